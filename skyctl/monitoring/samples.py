"""A fleet at one moment, as `skyctl top` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from skyctl.core.status import FleetStatus
from skyctl.launch.local.devices import GpuUsage
from skyctl.store.state import Event

if TYPE_CHECKING:
    pass


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
    """What the API does now."""
    cpu_percent: float | None
    """100 per busy core of its process tree."""
    rss_bytes: int | None
    """Memory of its process tree."""
    models: int | None = None
    """How many models the training process holds."""
    operation: str | None = None
    """What the training process does now."""
    operation_s: float | None = None
    """For how long it has been doing that."""


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
