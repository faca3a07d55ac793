"""The data of `skyctl status`: one row per replica and front, and a verdict with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from skyctl.errors import ExitCode, SkyctlError
from skyctl.states import UNLABELLED, ReplicaState


class Health(StrEnum):
    """What the users of a fleet meet."""

    HEALTHY = "healthy"
    """Every server answers."""
    PARTIAL = "partial"
    """Some servers answer; the others are paused, asleep, starting or being updated."""
    DEGRADED = "degraded"
    """Some servers answer, and something is wrong."""
    UPDATING = "updating"
    """A push has all servers: requests wait, with `--canary` they are refused."""
    STARTING = "starting"
    """No server answers yet."""
    STOPPING = "stopping"
    """`skyctl down` is under way: requests are refused."""
    PAUSED = "paused"
    """Every server is paused: requests wait."""
    ASLEEP = "asleep"
    """Every server is asleep: requests are refused."""
    UNAVAILABLE = "unavailable"
    """No server answers, and something is wrong."""
    DOWN = "down"
    """Nothing runs."""

    @property
    def exit_code(self) -> ExitCode:
        """The code of `skyctl status --exit-code`: 0 while users are served as intended."""
        if self in (Health.HEALTHY, Health.PARTIAL, Health.UPDATING):
            return ExitCode.OK
        return ExitCode.NOT_FOUND if self is Health.DOWN else ExitCode.FAILED


@dataclass(frozen=True)
class ReplicaStatus:
    """One server. A number is None if unknown."""

    name: str
    """Its name."""
    state: ReplicaState
    """What it does now."""
    url: str
    """Where it is."""
    reason: str = ""
    """Why it is in this state."""
    routed: bool | None = None
    """Whether the router sends it requests; None without a router."""
    pid: int | None = None
    """Of its server process, on its `node`."""
    port: int | None = None
    """Where it listens."""
    gpus: tuple[int, ...] = ()
    """Physical indices."""
    running: int | None = None
    """Requests it generates for."""
    waiting: int | None = None
    """Requests in its queue."""
    kv_usage: float | None = None
    """Its KV cache in use, 0..1."""
    prompt_tokens: int | None = None
    """Counted since it started."""
    generation_tokens: int | None = None
    """Counted since it started."""
    prefix_cache_queries: int | None = None
    """Counted since it started."""
    prefix_cache_hits: int | None = None
    """Counted since it started."""
    weight_version: str | None = None
    """What this fleet gave it."""
    reported_version: str | None = None
    """The label that it reports itself."""
    uptime_s: float | None = None
    """Since its process started."""
    state_s: float | None = None
    """Spent in this state."""
    rss_bytes: int | None = None
    """Resident memory of its processes."""
    restarts: int = 0
    """How often it was restarted."""
    restart_reason: str = ""
    """Why it was last restarted."""
    log_line: str = ""
    """What it logs while it starts."""
    node: str | None = None
    """The machine that it is on; None for this one."""
    role: str = ""
    """prefill or decode; "" for a server that does both."""


@dataclass(frozen=True)
class FrontStatus:
    """The Tinker API. A number is None if unknown."""

    state: ReplicaState
    """What it does now."""
    url: str
    """Where clients reach it."""
    reason: str = ""
    """Why it is in this state."""
    pid: int | None = None
    """Of its process."""
    port: int | None = None
    """Where it listens."""
    uptime_s: float | None = None
    """Since its process started."""
    rss_bytes: int | None = None
    """Resident memory of its processes."""
    restarts: int = 0
    """How often it was restarted."""
    restart_reason: str = ""
    """Why it was last restarted."""


@dataclass(frozen=True)
class RouterStatus(FrontStatus):
    """The router."""

    metrics_port: int | None = None
    workers: int | None = None


class OperationKind(StrEnum):
    """What a supervisor does to its processes, one at a time."""

    UP = "up"
    SCALE = "scale"
    RESTART = "restart"
    ADOPT = "adopt"
    """It takes over what an earlier supervisor left."""
    RECOVER = "recover"
    DOWN = "down"

    @property
    def repairs(self) -> bool:
        """Whether it repairs what it finds."""
        return self in (OperationKind.ADOPT, OperationKind.RECOVER)


@dataclass(frozen=True)
class Operation:
    """What the supervisor is busy with, or did last."""

    id: int
    """Counted up with each."""
    kind: OperationKind
    """What it does."""
    detail: str
    """With what: names of servers, or the reason."""
    began_at: float
    """In seconds since the epoch."""
    ended_at: float | None = None
    """In seconds since the epoch; None while it runs."""
    error: str = ""
    """Empty while it runs, and if it succeeded."""

    def under_way(self, kind: OperationKind) -> bool:
        """Whether it is of this kind, and goes on."""
        return self.kind is kind and self.ended_at is None


INTERRUPTED = "interrupted: what it started was stopped"
BY_DOWN = "stopped by `skyctl down`"
"""The error of an operation that `down` stopped; it did not fail."""


def ended_by_others(kind: str, how: str) -> SkyctlError:
    """The error of an operation that another command ended: nothing failed, no log says more."""
    return SkyctlError(f"{kind} was {how}", hint="start it again: skyctl up", details={"logs": {}})


@dataclass(frozen=True)
class Reason:
    """Why a fleet is not healthy."""

    message: str
    """What is not as it should be, or not yet."""
    hint: str = ""
    """What to type about it, "" if it ends by itself."""
    fault: bool = True
    """Whether something is wrong; False for what was requested, and for an ordinary start."""


@dataclass(frozen=True)
class FleetStatus:
    """One fleet at one moment."""

    name: str
    """Its name."""
    health: Health
    """What its users meet."""
    replicas: tuple[ReplicaStatus, ...]
    """Its servers, in order."""
    router: RouterStatus | None
    """None where there is none."""
    reasons: tuple[Reason, ...] = ()
    """Why it is not healthy."""
    supervised: bool | None = None
    """Whether a supervisor answers; None for an attached fleet."""
    supervisor_pid: int | None = None
    """Of its supervisor."""
    device: str | None = None
    """cpu or cuda."""
    model: str | None = None
    """The name that clients give the model."""
    weight_version: str | None = None
    """The version of its last push; None before the first."""
    operation: Operation | None = None
    """What the supervisor does, or did last."""
    job: str | None = None
    """The push that is under way."""
    rollout: str | None = None
    """How far a rolling push is; None without one."""
    adapters: tuple[str, ...] = ()
    """Those it serves, as `name@version`."""
    tinker: FrontStatus | None = None
    """The Tinker API; None where there is none."""
    base: str | None = None
    """What servers are started with: a directory, or `ORG/NAME@COMMIT`."""

    @property
    def fronts(self) -> dict[str, FrontStatus]:
        """The router and the Tinker API, as far as they exist, by name."""
        fronts = {"router": self.router, "tinker": self.tinker}
        return {name: front for name, front in fronts.items() if front is not None}

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
    pushing: bool = False,
    operation: OperationKind | None = None,
) -> tuple[Health, tuple[Reason, ...]]:
    """The verdict over a fleet, and the reasons if it is not healthy.

    `operation`: one of this kind is under way. `pushing`: a push is, and two versions are
    fine meanwhile; without one, a server that is updating is still being admitted.
    """
    reasons = [*_reasons(replicas, router, tinker, operation)]
    versions = {r.weight_version for r in replicas if r.state.as_intended}
    if len(versions) > 1 and not pushing:
        named = ", ".join(sorted(str(v or "base") for v in versions))
        reasons.append(Reason(f"{MIXED}, servers hold: {named}", "skyctl recover"))
    # one that does not answer may still have a process of ours
    if not any(
        r.state.lives or (r.state is ReplicaState.UNREACHABLE and r.pid is not None)
        for r in replicas
    ):
        return Health.DOWN, tuple(reasons)
    processes: list[ReplicaStatus | FrontStatus] = [*replicas]
    processes += [front for front in (router, tinker) if front is not None]
    answering = [r for r in replicas if r.state is ReplicaState.READY and r.routed is not False]
    # a fleet of prefill and decode servers needs both
    answers = {r.role for r in answering} == {r.role for r in replicas}
    answers = answers and (router is None or router.state is ReplicaState.READY)
    if any(reason.fault for reason in reasons):
        return Health.DEGRADED if answers else Health.UNAVAILABLE, tuple(reasons)
    if answers:
        complete = all(process.state is ReplicaState.READY for process in processes)
        health = Health.HEALTHY if complete else Health.PARTIAL
    else:
        health = _without_answers({process.state for process in processes}, pushing, operation)
        if health is Health.UNAVAILABLE:
            reasons.append(Reason("the router sends requests to no server", "skyctl doctor"))
    return health, (*reasons, *_conditions(health, replicas))


def _without_answers(
    states: set[ReplicaState], pushing: bool, operation: OperationKind | None
) -> Health:
    """The health of a sound fleet that answers no user."""
    if operation is OperationKind.DOWN:
        return Health.STOPPING
    if pushing and ReplicaState.UPDATING in states:
        return Health.UPDATING
    if any(state.busy or state is ReplicaState.STOPPED for state in states):
        return Health.STARTING
    if ReplicaState.PAUSED in states:
        return Health.PAUSED
    return Health.ASLEEP if ReplicaState.ASLEEP in states else Health.UNAVAILABLE


def _conditions(health: Health, replicas: Sequence[ReplicaStatus]) -> Iterator[Reason]:
    """What was requested and keeps users from servers, and what ends it ("": it ends by itself)."""
    for state, effect, end in (
        (ReplicaState.PAUSED, "requests wait", "skyctl resume"),
        (ReplicaState.ASLEEP, "requests are refused", "skyctl wake"),
        (ReplicaState.UPDATING, "requests wait or are refused", ""),
    ):
        names = [replica.name for replica in replicas if replica.state is state]
        if health is Health(state):
            yield Reason(f"the fleet is {state}: {effect}", end, fault=False)
        elif names:
            message = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {state}"
            yield Reason(message, end and f"{end} {' '.join(names)}", fault=False)


def _reasons(
    replicas: Sequence[ReplicaStatus],
    router: RouterStatus | None,
    tinker: FrontStatus | None,
    operation: OperationKind | None,
) -> Iterator[Reason]:
    """What keeps each server and front from being ready."""
    for replica in replicas:
        if (reason := _replica_reason(replica, operation)) is not None:
            yield reason
    for name, title, front in (("router", "router", router), ("tinker", "Tinker API", tinker)):
        if front is not None and front.state is not ReplicaState.READY:
            on_the_way = _on_the_way(front, operation)
            detail = f": {front.reason}" if front.reason else ""
            unreachable = front.state is ReplicaState.UNREACHABLE
            hint = "skyctl doctor" if unreachable else f"skyctl logs {name}"
            hint = "" if on_the_way or front.state.in_transition else hint
            yield Reason(f"the {title} is {front.state}{detail}", hint, fault=not on_the_way)


def _on_the_way(process: ReplicaStatus | FrontStatus, operation: OperationKind | None) -> bool:
    """Whether it starts or stops because that was requested, and not because it died."""
    if process.state is ReplicaState.STOPPED:
        return bool(operation)  # a restart stops it first
    requested = process.state in (ReplicaState.STARTING, ReplicaState.STOPPING)
    return requested and not process.restart_reason


def foreign_version(recorded: str | None, reported: str | None) -> str:
    """The version a server reports, if it is not the one this fleet gave it; else ""."""
    if reported is None or reported == (recorded or UNLABELLED):
        return ""
    return f"says that it holds {reported}, and this fleet gave it {recorded or 'nothing'}"


def _replica_reason(replica: ReplicaStatus, operation: OperationKind | None) -> Reason | None:
    if replica.state.as_intended:
        foreign = foreign_version(replica.weight_version, replica.reported_version)
        if foreign and replica.state is not ReplicaState.UPDATING:
            message = f"{replica.name} {foreign}: a program other than skyctl pushed to it"
            hint = "compare: skyctl weights verify; or put it right: skyctl recover"
            return Reason(message, hint)
        return None
    death = replica.restart_reason if replica.state is ReplicaState.STARTING else ""
    detail = f": {replica.reason or death}" if replica.reason or death else ""
    if _on_the_way(replica, operation):
        return Reason(f"{replica.name} is {replica.state}{detail}", fault=False)
    again = f"skyctl logs {replica.name}; then: skyctl restart {replica.name}"
    hint = (
        again if replica.state.given_up else "skyctl recover" if replica.state.recoverable else ""
    )
    hint = "skyctl up" if replica.state is ReplicaState.STOPPED else hint
    return Reason(f"{replica.name} is {replica.state}{detail}", hint)
