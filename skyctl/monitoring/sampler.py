"""What `skyctl top` shows of a fleet at one moment, sampled repeatedly at a bounded cost.

One sample is one status (the supervisor asks each server for a few metrics, once), the router's
metrics page, one read of the state file, and the CPU times of known processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyctl import engines
from skyctl.core.requests import EventQuery, StatusQuery
from skyctl.core.status import FleetStatus, FrontStatus, ReplicaStatus, RouterStatus, TinkerStatus
from skyctl.engines.base import RouterMetrics
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient
from skyctl.launch.local.devices import GpuUsage, gpu_reader
from skyctl.states import ReplicaState

if TYPE_CHECKING:
    from skyctl.service import FleetService
from skyctl.monitoring.process_trees import ProcessTrees, TreeUsage
from skyctl.monitoring.samples import (
    FleetSample,
    JobSample,
    ReplicaSample,
    RouterSample,
    TinkerSample,
)

ROUTER_TIMEOUT_S = 2.0
EVENTS = 50
# nvidia-smi takes tenths of a second of a core; utilisation moves slowly enough for this
GPUS_EVERY_S = 2.0


class RateMeter:
    """Rates of named counters. `at` is seconds on a clock that never goes back."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def per_second(self, name: str, value: float | None, at: float) -> float | None:
        """Growth per second since the last sample; None at the first and after a restart.

        A counter that went down belongs to a new process: its sample is a first one again.
        """
        delta = self._take(name, value, at)
        return None if delta is None else delta[0] / delta[1]

    def ratio(self, name: str, part: float | None, whole: float | None, at: float) -> float | None:
        """Growth of `part` over the growth of `whole`; None while `whole` does not grow."""
        part_delta = self._take(f"{name} part", part, at)
        whole_delta = self._take(f"{name} whole", whole, at)
        if part_delta is None or whole_delta is None or whole_delta[0] <= 0:
            return None
        return part_delta[0] / whole_delta[0]

    def _take(self, name: str, value: float | None, at: float) -> tuple[float, float] | None:
        """(growth, seconds) since the last sample of this counter."""
        if value is None:
            self._seen.pop(name, None)
            return None
        before = self._seen.get(name)
        self._seen[name] = (value, at)
        if before is None or value < before[0] or at <= before[1]:
            return None
        return value - before[0], at - before[1]


class Sampler:
    """Samples one fleet. Use it in an `async with`; samples must not overlap."""

    def __init__(
        self,
        fleet: FleetService,
        *,
        engine: str = engines.DEFAULT,
        client: ControlClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        read_gpus: Callable[[], dict[int, GpuUsage]] | None = None,
    ) -> None:
        self._fleet = fleet
        self._engine = engine
        self._client = client or ControlClient()
        self._clock = clock
        self._read_gpus = read_gpus
        self._trees = ProcessTrees(clock=clock)
        self._rates = RateMeter()
        self._hit_rates: dict[str, float] = {}
        self._states: dict[str, tuple[str, float]] = {}
        self._gpus: dict[int, GpuUsage] = {}
        self._gpus_at = float("-inf")
        self._last: float | None = None

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def sample(self) -> FleetSample:
        """Sample everything; rates are since the previous sample.

        Raises:
            SkyctlError: the fleet's status is unavailable.
        """
        began = self._clock()
        status = await self._fleet.status(StatusQuery(fresh=self._last is None))
        at = self._clock()
        pids = [replica.pid for replica in status.replicas if replica.pid and replica.node is None]
        pids += [front.pid for front in status.fronts.values() if front.pid]
        router_metrics, trees, gpus = await asyncio.gather(
            self._router_metrics(status.router),
            asyncio.to_thread(self._trees.usage, pids),
            self._gpu_usage(status, at),
        )
        tinker = status.tinker
        interval_s = None if self._last is None else at - self._last
        self._last = at
        return FleetSample(
            at=time.time(),
            interval_s=interval_s,
            took_s=self._clock() - began,
            status=status,
            replicas=tuple(self._replica(r, trees, gpus, at) for r in status.replicas),
            router=self._router(status.router, router_metrics, trees, at),
            tinker=_tinker_sample(tinker, trees) if tinker else None,
            job=await self._job(status),
            events=tuple(await self._fleet.events(EventQuery(EVENTS))),
        )

    def _replica(
        self,
        replica: ReplicaStatus,
        trees: Mapping[int, TreeUsage],
        gpus: Mapping[int, GpuUsage],
        at: float,
    ) -> ReplicaSample:
        name = replica.name
        if replica.node is not None:  # its pid and its GPUs are on another machine
            trees, gpus = {}, {}
        recent = self._rates.ratio(
            name, replica.prefix_cache_hits, replica.prefix_cache_queries, at
        )
        if recent is not None:
            self._hit_rates[name] = recent
        return ReplicaSample(
            status=replica,
            state_s=self._state_s(replica, at),
            prefix_hit_rate=self._hit_rates.get(name),
            prompt_tokens_per_s=self._rates.per_second(f"{name} prompt", replica.prompt_tokens, at),
            generation_tokens_per_s=self._rates.per_second(
                f"{name} generation", replica.generation_tokens, at
            ),
            **_usage(replica, trees),
            gpus=tuple(gpus[index] for index in replica.gpus if index in gpus),
        )

    def _state_s(self, replica: ReplicaStatus, at: float) -> float:
        """Seconds in this state; since our first sample of it if no process records the time."""
        before = self._states.get(replica.name)
        if before is None or before[0] != replica.state:
            self._states[replica.name] = before = (replica.state, at)
        return at - before[1] if replica.state_s is None else replica.state_s

    def _router(
        self,
        router: RouterStatus | None,
        metrics: RouterMetrics | None,
        trees: Mapping[int, TreeUsage],
        at: float,
    ) -> RouterSample | None:
        if router is None:
            return None
        requests = metrics.requests if metrics else None
        errors = metrics.errors if metrics else None
        return RouterSample(
            state=router.state,
            workers=router.workers,
            requests=requests,
            errors=errors,
            retries=metrics.retries if metrics else None,
            requests_per_s=self._rates.per_second("router requests", requests, at),
            errors_per_s=self._rates.per_second("router errors", errors, at),
            **_usage(router, trees),
        )

    async def _router_metrics(self, router: RouterStatus | None) -> RouterMetrics | None:
        if router is None or router.metrics_port is None or router.state is not ReplicaState.READY:
            return None
        host = urlsplit(router.url).netloc.rpartition(":")[0]
        url = f"http://{host}:{router.metrics_port}"
        try:
            ask = engines.routing(self._engine).metrics
            return await ask(self._client, url, ROUTER_TIMEOUT_S)
        except SkyctlError:
            return None  # its state says what is wrong with it

    async def _gpu_usage(self, status: FleetStatus, at: float) -> dict[int, GpuUsage]:
        if any(replica.gpus for replica in status.replicas) and at - self._gpus_at >= GPUS_EVERY_S:
            self._gpus_at = at
            if self._read_gpus is None:
                self._read_gpus = await asyncio.to_thread(gpu_reader)
            self._gpus = await asyncio.to_thread(self._read_gpus)
        return self._gpus

    async def _job(self, status: FleetStatus) -> JobSample | None:
        job = None
        if status.supervised is None:
            # only the journal knows of a push into servers that we did not start
            latest = (await self._fleet.jobs())[:1]
            job = next((job for job in latest if not job.ended), None)
        elif status.job:
            job = await self._fleet.job(status.job)
        if job is None:
            return None
        return JobSample(
            id=job.id,
            stage=job.stage,
            done_bytes=job.done_bytes,
            total_bytes=job.total_bytes,
            checkpoint=str(job.request.get("checkpoint", "")),
            running_s=max(0.0, time.time() - job.created_at),
        )


def _tinker_sample(tinker: TinkerStatus, trees: Mapping[int, TreeUsage]) -> TinkerSample:
    return TinkerSample(
        tinker.state,
        **_usage(tinker, trees),
        models=tinker.models,
        operation=tinker.operation,
        operation_s=tinker.operation_s,
    )


def _usage(process: ReplicaStatus | FrontStatus, trees: Mapping[int, TreeUsage]) -> dict[str, Any]:
    """`cpu_percent` and `rss_bytes` of its process tree, as far as they are known."""
    if tree := trees.get(process.pid or 0):
        return {"cpu_percent": tree.cpu_percent, "rss_bytes": tree.rss_bytes}
    return {"cpu_percent": None, "rss_bytes": process.rss_bytes}
