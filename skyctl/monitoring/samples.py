"""A fleet at one moment, as `skyctl top` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from skyctl.core.status import FleetStatus, ReplicaStatus
from skyctl.launch.local.devices import GpuUsage
from skyctl.store.state import Event


@dataclass(frozen=True)
class ReplicaSample:
    """One server. Rates are over the interval; unknown values are None."""

    status: ReplicaStatus
    """What `skyctl status` shows of it."""
    state_s: float
    """How long it has been in its state."""
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

    def to_json(self) -> dict[str, Any]:
        """Its part of the sample's JSON."""
        status = self.status
        return {
            "name": status.name,
            "state": status.state,
            "reason": status.reason,
            "state_s": self.state_s,
            "routed": status.routed,
            "running": status.running,
            "waiting": status.waiting,
            "kv_usage": status.kv_usage,
            "prefix_hit_rate": self.prefix_hit_rate,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "generation_tokens_per_s": self.generation_tokens_per_s,
            "cpu_percent": self.cpu_percent,
            "rss_bytes": self.rss_bytes,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "weight_version": status.weight_version,
            "restarts": status.restarts,
            "role": status.role,
        }


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
            "replicas": [replica.to_json() for replica in self.replicas],
            "router": self.router and asdict(self.router),
            "tinker": self.tinker and asdict(self.tinker),
            "job": self.job and asdict(self.job),
            "events": [asdict(event) for event in self.events],
        }
