"""What `skyctl top` shows of a fleet at one moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from skyctl.core.status import FleetStatus
from skyctl.monitoring.gpus import GpuUsage
from skyctl.store.state import Event


@dataclass(frozen=True)
class ReplicaSample:
    """One server. Rates are over the interval; unknown values are None.

    `prefix_hit_rate` is hits per queried token, 0..1, of the last interval that had queries.
    `cpu_percent` is 100 per busy core of its process tree; `gpus` those it runs on. `role` is
    prefill or decode, "" for a server that does both.
    """

    name: str
    state: str
    reason: str
    state_s: float | None
    routed: bool | None
    running: int | None
    waiting: int | None
    kv_usage: float | None
    prefix_hit_rate: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    cpu_percent: float | None
    rss_bytes: int | None
    gpus: tuple[GpuUsage, ...]
    weight_version: str | None
    restarts: int
    role: str = ""


@dataclass(frozen=True)
class RouterSample:
    """The router; counters since it started, rates over the interval, None where unknown."""

    state: str
    workers: int | None
    requests: int | None
    errors: int | None
    retries: int | None
    requests_per_s: float | None
    errors_per_s: float | None
    cpu_percent: float | None
    rss_bytes: int | None


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
    stage: str
    done_bytes: int
    total_bytes: int
    checkpoint: str
    running_s: float


@dataclass(frozen=True)
class FleetSample:
    """A fleet at one moment. `interval_s` is what the rates are over, None in a first sample.

    `at` is seconds since the epoch; `took_s` what the sample itself cost.
    """

    at: float
    interval_s: float | None
    took_s: float
    status: FleetStatus
    replicas: tuple[ReplicaSample, ...]
    router: RouterSample | None
    tinker: TinkerSample | None
    job: JobSample | None
    events: tuple[Event, ...]

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
