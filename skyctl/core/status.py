"""The data of `skyctl status`: one row per replica and front, and a verdict with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from skyctl.errors import SkyctlError

Health = Literal["healthy", "degraded", "down"]
# States in which a server does what it was asked to.
INTENDED_STATES = ("ready", "paused", "asleep", "updating")
TRANSIENT_STATES = ("starting", "restarting", "stopping")


@dataclass(frozen=True)
class ReplicaStatus:
    """One server. `kv_usage` is 0..1; a field is None if unknown.

    `state` is starting, ready, paused, asleep, updating, restarting, stopping, stopped, dead,
    failed, quarantined or unreachable; `reason` says why. `state_s` is the seconds spent in it.
    `restart_reason` is why it was last restarted, of `restarts` times. The token and cache fields
    are counters since the server started. `weight_version` is what this fleet gave it,
    `reported_version` the label that the server itself reports now. `node` is the machine that it
    and its `pid` are on, None for this one. `role` is prefill or decode, "" for a server that does
    both.
    """

    name: str
    state: str
    url: str
    reason: str = ""
    routed: bool | None = None
    pid: int | None = None
    port: int | None = None
    gpus: tuple[int, ...] = ()
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_cache_queries: int | None = None
    prefix_cache_hits: int | None = None
    weight_version: str | None = None
    reported_version: str | None = None
    uptime_s: float | None = None
    state_s: float | None = None
    rss_bytes: int | None = None
    restarts: int = 0
    restart_reason: str = ""
    log_line: str = ""
    node: str | None = None
    role: str = ""


@dataclass(frozen=True)
class FrontStatus:
    """The Tinker API. `state` is starting, ready, restarting, stopped, dead, failed, unsupervised
    or unreachable."""

    state: str
    url: str
    reason: str = ""
    pid: int | None = None
    port: int | None = None
    uptime_s: float | None = None
    rss_bytes: int | None = None
    restarts: int = 0
    restart_reason: str = ""


@dataclass(frozen=True)
class RouterStatus(FrontStatus):
    """The router; states as above."""

    metrics_port: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Operation:
    """What the supervisor is busy with, or did last: up, restart, scale, down or a push job.

    `error` is empty while it runs and if it succeeded. Times are seconds since the epoch.
    """

    id: int
    kind: str
    detail: str
    began_at: float
    ended_at: float | None = None
    error: str = ""


INTERRUPTED = "interrupted: what it started was stopped"
BY_DOWN = "stopped by `skyctl down`"
"""The error of an operation that `down` stopped; it did not fail."""


def ended_by_others(kind: str, how: str) -> SkyctlError:
    """The error of an operation that somebody else ended: nothing failed, and no log says more."""
    return SkyctlError(f"{kind} was {how}", hint="start it again: skyctl up", details={"logs": {}})


@dataclass(frozen=True)
class Reason:
    """Why a fleet is not healthy, and what to type about it."""

    message: str
    hint: str = ""


@dataclass(frozen=True)
class FleetStatus:
    """One fleet at one moment. `supervised` is None for an attached fleet. `rollout` says how far a
    rolling push is, None without one. `adapters` are those it serves, as `name@version`.
    """

    name: str
    health: Health
    replicas: tuple[ReplicaStatus, ...]
    router: RouterStatus | None
    reasons: tuple[Reason, ...] = ()
    supervised: bool | None = None
    supervisor_pid: int | None = None
    device: str | None = None
    model: str | None = None
    weight_version: str | None = None
    operation: Operation | None = None
    job: str | None = None
    rollout: str | None = None
    adapters: tuple[str, ...] = ()
    tinker: FrontStatus | None = None

    @property
    def fronts(self) -> dict[str, FrontStatus]:
        """The router and the Tinker API, as far as they exist, by name."""
        found = {"router": self.router, "tinker": self.tinker}
        return {name: front for name, front in found.items() if front is not None}

    def to_json(self) -> dict[str, Any]:
        """What `skyctl status --json` prints."""
        return asdict(self)


MIXED = "weights are mixed"
"""How the reason for mixed weights begins."""


def assess(
    replicas: Sequence[ReplicaStatus],
    router: RouterStatus | None,
    tinker: FrontStatus | None = None,
    *,
    rolling: bool = False,
) -> tuple[Health, tuple[Reason, ...]]:
    """The verdict over a fleet: down if nothing runs, degraded if anything is wrong. Two versions
    are fine while a push is `rolling`.
    """
    reasons = [_replica_reason(replica) for replica in replicas]
    for name, title, front in (("router", "router", router), ("tinker", "Tinker API", tinker)):
        if front is not None and front.state != "ready":
            detail = f": {front.reason}" if front.reason else ""
            hint = "" if front.state in TRANSIENT_STATES else f"skyctl logs {name}"
            reasons.append(Reason(f"the {title} is {front.state}{detail}", hint))
    versions = {r.weight_version for r in replicas if r.state in INTENDED_STATES}
    if len(versions) > 1 and not rolling:
        named = ", ".join(sorted(str(v or "base") for v in versions))
        reasons.append(Reason(f"{MIXED}, servers hold: {named}", "skyctl recover"))
    found = tuple(reason for reason in reasons if reason is not None)
    alive = (*INTENDED_STATES, *TRANSIENT_STATES, "quarantined")
    # one that does not answer may still have a process of ours
    if any(r.state in alive or (r.state == "unreachable" and r.pid is not None) for r in replicas):
        return ("degraded" if found else "healthy"), found
    return "down", found


UNLABELLED = "default"
"""What a server reports that was never given a version."""


def foreign_version(recorded: str | None, reported: str | None) -> str:
    """The version a server reports, if it is not the one this fleet gave it; else ""."""
    if reported is None or reported == (recorded or UNLABELLED):
        return ""
    return f"says that it holds {reported}, and this fleet gave it {recorded or 'nothing'}"


def _replica_reason(replica: ReplicaStatus) -> Reason | None:
    if replica.state in INTENDED_STATES:
        foreign = foreign_version(replica.weight_version, replica.reported_version)
        if foreign and replica.state != "updating":
            said = f"{replica.name} {foreign}: somebody else pushed to it"
            return Reason(said, "compare: skyctl weights verify; or put it right: skyctl recover")
        return None
    detail = f": {replica.reason}" if replica.reason else ""
    again = f"skyctl logs {replica.name}; then: skyctl restart {replica.name}"
    hints = {"failed": again, "dead": again, "stopped": "skyctl up"}
    hints |= dict.fromkeys(("quarantined", "unreachable", "unsupervised"), "skyctl recover")
    return Reason(f"{replica.name} is {replica.state}{detail}", hints.get(replica.state, ""))
