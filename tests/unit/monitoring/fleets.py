"""A fleet that answers what a test tells it to, and samples of one."""

from __future__ import annotations

from typing import Any

from skyctl.core.requests import EventQuery, StatusQuery
from skyctl.core.service import FleetService
from skyctl.core.status import FleetStatus, ReplicaStatus, RouterStatus
from skyctl.launch.local.devices import GpuUsage
from skyctl.monitoring.samples import (
    FleetSample,
    JobSample,
    ReplicaSample,
    RouterSample,
    TinkerSample,
)
from skyctl.states import ReplicaState
from skyctl.store.journal import Job
from skyctl.store.state import Event


def replica(name: str = "tiny-0", **fields: Any) -> ReplicaStatus:
    state = ReplicaState(fields.pop("state", "ready"))
    return ReplicaStatus(name, state, "http://127.0.0.1:1", **fields)


def status(*replicas: ReplicaStatus, **fields: Any) -> FleetStatus:
    defaults: dict[str, Any] = {"name": "tiny", "health": "healthy", "supervised": True}
    router = RouterStatus(
        ReplicaState.READY, "http://127.0.0.1:2", metrics_port=3, workers=len(replicas)
    )
    return FleetStatus(**{**defaults, "replicas": replicas, "router": router, **fields})


class ToldFleet(FleetService):
    """Gives the statuses it was told, one after the other, and then the last again."""

    def __init__(self, *statuses: FleetStatus, job: Job | None = None) -> None:
        self._statuses = list(statuses)
        self._job = job
        self.asked_fresh: list[bool] = []

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        self.asked_fresh.append(request.fresh)
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]

    async def events(self, request: EventQuery = EventQuery()) -> tuple[Event, ...]:
        return (Event(0.0, "tiny-0", "started", 1),)

    async def job(self, job_id: str) -> Job:
        assert self._job is not None and self._job.id == job_id
        return self._job

    async def jobs(self) -> tuple[Job, ...]:
        return (self._job,) if self._job else ()


def replica_sample(
    name: str = "tiny-0",
    *,
    gpus: tuple[GpuUsage, ...] = (),
    generation_tokens_per_s: float | None = 340.0,
    **fields: Any,
) -> ReplicaSample:
    """`fields` are those of its status."""
    defaults: dict[str, Any] = {"routed": True, "running": 2, "waiting": 0, "kv_usage": 0.25}
    return ReplicaSample(
        status=replica(name, **{**defaults, **fields}),
        state_s=5.0,
        prefix_hit_rate=0.5,
        prompt_tokens_per_s=12.0,
        generation_tokens_per_s=generation_tokens_per_s,
        cpu_percent=80.0,
        rss_bytes=3 * 1024**3,
        gpus=gpus,
    )


def fleet_sample(*replicas: ReplicaSample, **fields: Any) -> FleetSample:
    defaults: dict[str, Any] = {
        "at": 0.0,
        "interval_s": 1.0,
        "took_s": 0.01,
        "status": status(),
        "router": RouterSample("ready", 2, 10, 1, 0, 4.0, 0.5, 2.0, 80 * 1024**2),
        "tinker": TinkerSample("ready", 130.0, 2 * 1024**3, 3, "optim_step", 75.0),
        "job": JobSample("push-3", "update", 512 * 1024**2, 1024**3, "runs/step-200", 1.5),
        "events": (Event(0.0, "tiny-0", "started", 1), Event(1.0, "fleet", "up: done", 2)),
    }
    return FleetSample(replicas=replicas, **{**defaults, **fields})
