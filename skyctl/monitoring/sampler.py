"""What `skyctl top` shows of a fleet at one moment, sampled repeatedly at a bounded cost.

One sample is one status (the supervisor asks each server for a few metrics, once), the router's
metrics page, one read of the state file, and the CPU times of known processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from skyctl import engines
from skyctl.core.service import EventQuery, StatusQuery
from skyctl.core.status import FleetStatus, FrontStatus, ReplicaStatus, RouterStatus
from skyctl.engines.base import RouterMetrics
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient
from skyctl.launch.local.devices import GpuUsage, gpu_reader
from skyctl.store.state import Event

if TYPE_CHECKING:
    from skyctl.service import FleetService

# finding children reads all of /proc, so it is done rarely; servers seldom get new ones
TREES_EVERY_S = 5.0
ROUTER_TIMEOUT_S = 2.0
EVENTS = 50
# nvidia-smi takes tenths of a second of a core; utilisation moves slowly enough for this
GPUS_EVERY_S = 2.0


@dataclass(frozen=True)
class ReplicaSample:
    """One server. Rates are over the interval; unknown values are None."""

    name: str
    """The server's name."""
    state: str
    """Its state, as `skyctl status` shows it."""
    reason: str
    """Why it is in this state; "" if that is expected."""
    state_s: float | None
    """How long it has been in this state."""
    routed: bool | None
    """Whether the router sends it requests."""
    running: int | None
    """Requests that it computes."""
    waiting: int | None
    """Requests in its queue."""
    kv_usage: float | None
    """The used share of its KV cache, 0 to 1."""
    prefix_hit_rate: float | None
    """Cache hits per queried token, 0 to 1, in the last interval that had queries."""
    prompt_tokens_per_s: float | None
    """Tokens of prompts that it read."""
    generation_tokens_per_s: float | None
    """Tokens that it generated."""
    cpu_percent: float | None
    """100 per busy core of its process tree."""
    rss_bytes: int | None
    """Memory of its process tree."""
    gpus: tuple[GpuUsage, ...]
    """The GPUs it runs on."""
    weight_version: str | None
    """The version of its weights."""
    restarts: int
    """How many times it was started again."""
    role: str = ""
    """`prefill` or `decode`; "" for a server that does both."""


@dataclass(frozen=True)
class RouterSample:
    """The router; counters since it started, rates over the interval, None where unknown."""

    state: str
    """Its state."""
    workers: int | None
    """Servers that it lists."""
    requests: int | None
    """Requests that it took."""
    errors: int | None
    """Requests that failed."""
    retries: int | None
    """Requests that it sent to another server."""
    requests_per_s: float | None
    """Rate of requests."""
    errors_per_s: float | None
    """Rate of failed requests."""
    cpu_percent: float | None
    """100 per busy core of its process tree."""
    rss_bytes: int | None
    """Memory of its process tree."""


@dataclass(frozen=True)
class TinkerSample:
    """The Tinker API with its training process; None where unknown."""

    state: str
    cpu_percent: float | None
    rss_bytes: int | None


@dataclass(frozen=True)
class JobSample:
    """The push in progress."""

    id: str
    """Its job's id."""
    stage: str
    """The stage it is in."""
    done_bytes: int
    """Bytes that were sent."""
    total_bytes: int
    """Bytes to send."""
    checkpoint: str
    """What is pushed."""
    running_s: float
    """How long it has been running."""


@dataclass(frozen=True)
class FleetSample:
    """A fleet at one moment."""

    at: float
    """When it was taken, in seconds since the epoch."""
    interval_s: float | None
    """The time that rates are over; None in a first sample."""
    took_s: float
    """How long the sample took."""
    status: FleetStatus
    """What `skyctl status` shows."""
    replicas: tuple[ReplicaSample, ...]
    """Every server."""
    router: RouterSample | None
    """The router; None without one."""
    tinker: TinkerSample | None
    """The Tinker API; None without one."""
    job: JobSample | None
    """The push in progress, if any."""
    events: tuple[Event, ...]
    """The latest events, oldest first."""

    def to_json(self) -> dict[str, Any]:
        """What `skyctl top --json` prints."""
        status = self.status
        return {
            "name": status.name,
            "health": status.health,
            "reasons": [asdict(reason) for reason in status.reasons],
            "device": status.device,
            "model": status.model,
            "weight_version": status.weight_version,
            "at": self.at,
            "interval_s": self.interval_s,
            "replicas": [asdict(replica) for replica in self.replicas],
            "router": self.router and asdict(self.router),
            "tinker": self.tinker and asdict(self.tinker),
            "job": self.job and asdict(self.job),
            "events": [asdict(event) for event in self.events],
        }


@dataclass(frozen=True)
class TreeUsage:
    """Usage of one process tree. `cpu_percent` is 100 per busy core, None in the first sample.

    `rss_bytes` counts shared memory once for each process that shares it.
    """

    cpu_percent: float | None
    rss_bytes: int
    processes: int


class ProcessTrees:
    """Watches trees by the pid of their first process. Not for several threads at once."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[int, list[psutil.Process]] = {}
        self._looked_at = float("-inf")
        self._cpu: dict[tuple[int, float], float] = {}
        self._measured_at: float | None = None

    def usage(self, roots: Iterable[int]) -> dict[int, TreeUsage]:
        """Usage by root pid since the last call; roots that are gone are left out."""
        now = self._clock()
        watched = set(roots)
        if now - self._looked_at >= TREES_EVERY_S or watched - self._members.keys():
            self._members, self._looked_at = _trees(watched), now
        before, since = self._cpu, self._measured_at
        self._cpu, self._measured_at = {}, now
        usages = {}
        for root in watched:
            usage = self._measure(self._members.get(root, []), before, since and now - since)
            if usage.processes:
                usages[root] = usage
        return usages

    def _measure(
        self,
        members: Iterable[psutil.Process],
        before: Mapping[tuple[int, float], float],
        seconds: float | None,
    ) -> TreeUsage:
        spent, rss, count, measured_before = 0.0, 0, 0, False
        for process in members:
            try:
                with process.oneshot():
                    key = (process.pid, process.create_time())
                    times = process.cpu_times()
                    rss += process.memory_info().rss
            except psutil.Error:
                continue
            count += 1
            self._cpu[key] = times.user + times.system
            if key in before:
                measured_before = True
                spent += self._cpu[key] - before[key]
        percent = 100 * spent / seconds if measured_before and seconds else None
        return TreeUsage(percent, rss, count)


def _trees(roots: Iterable[int]) -> dict[int, list[psutil.Process]]:
    """Each root with all its descendants."""
    children: dict[int, list[psutil.Process]] = {}
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            parent = process.ppid()
        except psutil.Error:
            continue
        processes[process.pid] = process
        children.setdefault(parent, []).append(process)
    trees = {}
    for root in roots:
        members: list[psutil.Process] = []
        waiting = [processes[root]] if root in processes else []
        while waiting:
            process = waiting.pop()
            members.append(process)
            waiting += children.get(process.pid, [])
        trees[root] = members
    return trees


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
            tinker=TinkerSample(tinker.state, **_usage(tinker, trees)) if tinker else None,
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
            name=name,
            state=replica.state,
            reason=replica.reason,
            state_s=self._state_s(replica, at),
            routed=replica.routed,
            running=replica.running,
            waiting=replica.waiting,
            kv_usage=replica.kv_usage,
            prefix_hit_rate=self._hit_rates.get(name),
            prompt_tokens_per_s=self._rates.per_second(f"{name} prompt", replica.prompt_tokens, at),
            generation_tokens_per_s=self._rates.per_second(
                f"{name} generation", replica.generation_tokens, at
            ),
            **_usage(replica, trees),
            gpus=tuple(gpus[index] for index in replica.gpus if index in gpus),
            weight_version=replica.weight_version,
            restarts=replica.restarts,
            role=replica.role,
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
        if router is None or router.metrics_port is None or router.state != "ready":
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


def _usage(process: ReplicaStatus | FrontStatus, trees: Mapping[int, TreeUsage]) -> dict[str, Any]:
    """`cpu_percent` and `rss_bytes` of its process tree, as far as they are known."""
    if tree := trees.get(process.pid or 0):
        return {"cpu_percent": tree.cpu_percent, "rss_bytes": tree.rss_bytes}
    return {"cpu_percent": None, "rss_bytes": process.rss_bytes}
