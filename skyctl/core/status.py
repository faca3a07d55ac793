"""The data of `skyctl status`: one row per replica and front, and a verdict with reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from skyctl.core.findings import Finding
from skyctl.errors import ExitCode, SkyctlError
from skyctl.states import ReplicaState
from skyctl.store.fleet_weights import Canary, CanaryStage


class Health(StrEnum):
    """What the users of a fleet meet."""

    HEALTHY = "healthy"
    """Every server answers."""
    PARTIAL = "partial"
    """Some servers answer; the others are paused, asleep, starting or being updated."""
    DEGRADED = "degraded"
    """Some servers answer, and something is wrong."""
    UPDATING = "updating"
    """A push has all servers: requests wait, with `--trial` they are refused."""
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
    draft_tokens: int | None = None
    """Counted since it started."""
    accepted_tokens: int | None = None
    """Of the draft tokens; counted since it started."""
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


@dataclass(frozen=True)
class TrainerRank:
    """One of the processes that train."""

    pid: int
    """Of the process."""
    device: str
    """Where it computes."""


@dataclass(frozen=True)
class TinkerStatus(FrontStatus):
    """The Tinker API, with its trainer."""

    ranks: tuple[TrainerRank, ...] = ()
    """The processes of the trainer; none while it does not run."""
    models: int | None = None
    """How many models it holds."""
    operation: str | None = None
    """What it does now; None: nothing."""
    operation_s: float | None = None
    """For how long it has been doing that."""


@dataclass(frozen=True)
class ScalingStatus:
    """How load decides the number of replicas."""

    replicas: int
    """Those that serve or start."""
    min: int
    """The fewest there may be."""
    max: int
    """The most there may be."""
    target: str
    """What is measured: queue, kv or tokens."""
    value: float
    """How much of it a replica is to have at most."""
    load: float | None = None
    """How much a replica has now, on average; None while that is not known."""
    reason: str = ""
    """Why the number changes, or does not although it might."""
    asleep: tuple[str, ...] = ()
    """Removed servers that would be woken first."""

    def __str__(self) -> str:
        load = "load not known" if self.load is None else f"{self.target} {self.load:.3g}"
        compared = ">" if (self.load or 0.0) > self.value else "of"
        limit = "" if self.load is None else f" {compared} {self.value:g}"
        return f"{self.replicas} of {self.min}–{self.max} replicas, {load}{limit}"


@dataclass(frozen=True)
class GroupStatus:
    """The fleets that share this fleet's GPUs."""

    name: str
    """Of the group."""
    awake: str | None
    """The fleet that may be awake; None: none was chosen yet."""


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

    @property
    def undoable(self) -> bool:
        """Whether it can be stopped midway, and what it has begun put back."""
        return self in (OperationKind.UP, OperationKind.SCALE, OperationKind.RESTART)


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
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The last lines of those that did not come back and run with their old settings again."""

    @property
    def job(self) -> str:
        """What `jobs cancel` calls it: `up-3`."""
        return f"{self.kind}-{self.id}"

    def under_way(self, kind: OperationKind) -> bool:
        """Whether it is of this kind, and goes on."""
        return self.kind is kind and self.ended_at is None


INTERRUPTED = "interrupted: what it started was stopped"
BY_DOWN = "stopped by `skyctl down`"
"""The error of an operation that `down` stopped; it did not fail."""
BY_CANCEL = "cancelled by `jobs cancel`"
ENDED_BY_OTHERS = (INTERRUPTED, BY_DOWN, BY_CANCEL)


def ended_by_others(kind: str, how: str) -> SkyctlError:
    """The error of an operation that another command ended: nothing failed, no log says more."""
    return SkyctlError(f"{kind} was {how}", hint="start it again: skyctl up", details={"logs": {}})


@dataclass(frozen=True)
class RunningCanary:
    """Another version on some servers (`core/canary.py`)."""

    version: str | None
    servers: tuple[str, ...]
    share: float
    stage: CanaryStage

    @classmethod
    def recorded(cls, canary: Canary | None) -> RunningCanary | None:
        """As it is on record; None if there is none."""
        if canary is None:
            return None
        return cls(canary.weights.version, canary.servers, canary.share, canary.stage)


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
    reasons: tuple[Finding, ...] = ()
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
    tinker: TinkerStatus | None = None
    """The Tinker API; None where there is none."""
    base: str | None = None
    """What servers are started with: a directory, or `ORG/NAME@COMMIT`."""
    canary: RunningCanary | None = None
    """The canary; None where there is none."""
    config_digest: str = ""
    """Of the fleet file in force; "" where there is no supervisor."""
    scaling: ScalingStatus | None = None
    """How load decides the number of replicas; None where it does not."""
    sleep_group: GroupStatus | None = None
    """The fleets that share its GPUs; None where there are none."""
    unapplied: bool | None = None
    """Whether the fleet file is another than the one in force; None if that is not known."""

    @property
    def fronts(self) -> dict[str, FrontStatus]:
        """The router and the Tinker API, as far as they exist, by name."""
        fronts = {"router": self.router, "tinker": self.tinker}
        return {name: front for name, front in fronts.items() if front is not None}

    def to_json(self) -> dict[str, Any]:
        """What `skyctl status --json` prints."""
        return {**asdict(self), "reasons": [reason.as_reason() for reason in self.reasons]}
