"""What is wrong with each server, and what helps: observed now, judged by a pure function."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from skyctl import engines
from skyctl.core.health import sleep_level
from skyctl.core.status import foreign_version
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.servers import ENGINE_TIMEOUT_S
from skyctl.states import ReplicaState
from skyctl.store.in_doubt import InDoubt
from skyctl.store.locks import Holder
from skyctl.store.state import FleetWeights, ServerRow

HTTP_TIMEOUT_S = 3.0


class Condition(StrEnum):
    """What is the matter with a server, its supervisor, or a command that keeps others out."""

    HEALTHY = "healthy"
    BUSY = "busy"
    """Another state follows by itself."""
    FROZEN = "frozen"
    """A push paused it, sent nothing, and did not resume it."""
    WOKEN = "woken"
    """A push woke its weights, and did not put them to sleep again."""
    HALF_UPDATED = "half-updated"
    WRONG_VERSION = "wrong-version"
    QUARANTINED = "quarantined"
    STUCK = "stuck"
    """Its front end answers, its engine does not."""
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    UNSUPERVISED = "unsupervised"
    ORPHANED = "orphaned"
    """Its server is gone and left processes behind."""
    STALE = "stale"
    """Its record is of an earlier boot of the machine."""
    HALF_DOWN = "half-down"
    """A `skyctl down` was cut short."""
    OTHER_VERSION = "other-version"
    """Its supervisor is of another version of skyctl."""
    STOPPED = "stopped"
    """A process that others wait for is stopped (SIGSTOP)."""


class Action(StrEnum):
    """What recovery does about a condition."""

    NOTHING = "nothing"
    RESUME = "resume"
    SLEEP = "sleep"
    PUSH = "push"
    RESTART = "restart"
    QUARANTINE = "quarantine"
    ADOPT = "adopt"
    END = "end"
    DOWN = "down"
    REPLACE = "replace"

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return self is not Action.NOTHING

    @property
    def releases(self) -> bool:
        """Whether it gives a server back that has its weights whole."""
        return self in (Action.RESUME, Action.SLEEP)

    @property
    def replaces(self) -> bool:
        """Whether it ends the process, or takes it from its users until it is ended."""
        return self in (Action.RESTART, Action.QUARANTINE)


@dataclass(frozen=True)
class Observed:
    """One server as it answers now."""

    server: str
    """Its name."""
    state: ReplicaState | None = None
    """What its supervisor shows; None without one."""
    http: bool = True
    """Its front end answers."""
    engine: bool = True
    """Its engine core answers."""
    paused: bool = False
    """It says that it is paused."""
    sleep_level: int = 0
    """By its metrics, 0 awake: a sleeping server reports that it is paused as well."""
    version: str | None = None
    """The label it carries; None if it has none."""
    problem: str = ""
    """What did not answer."""
    version_problem: str = ""
    """Why the label is not known."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with one server, and what recovery does about it."""

    server: str
    condition: Condition
    detail: str = ""
    action: Action = Action.NOTHING

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"server": fields.pop("server"), "found": fields.pop("condition"), **fields}


def stopped(holder: Holder) -> Finding:
    """A command that is stopped: recovery ends it. A program that uses skyctl is its user's."""
    detail = str(holder) if holder.is_command else f"{holder}; {holder.hint('')}"
    return Finding(
        "holder", Condition.STOPPED, detail, Action.END if holder.is_command else Action.NOTHING
    )


async def observe(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    *,
    engine_timeout_s: float = ENGINE_TIMEOUT_S,
) -> list[Observed]:
    """Ask all servers at once, for at most `engine_timeout_s` seconds."""

    async def ask(target: ServerTarget) -> Observed:
        near = engines.server(client, target, timeout_s=HTTP_TIMEOUT_S)
        patient = engines.server(client, target, timeout_s=engine_timeout_s)
        health, paused, version = await asyncio.gather(
            near.health(), patient.is_paused(), patient.weight_version(), return_exceptions=True
        )
        # any answer, even the 503 of a dead engine, comes from its front end
        http = not isinstance(health, ServerError) or bool(health.status)
        if isinstance(paused, BaseException):
            return Observed(target.name, http=http, engine=False, problem=str(paused))
        label = version if isinstance(version, str) else None
        level = await sleep_level(client, target, HTTP_TIMEOUT_S) if paused else 0
        unread = str(version) if isinstance(version, BaseException) else ""
        return Observed(
            target.name, paused=paused, sleep_level=level, version=label, version_problem=unread
        )

    outcomes = await fan_out(targets, ask, timeout_s=engine_timeout_s + HTTP_TIMEOUT_S)
    return [
        outcome.value or Observed(outcome.server, http=False, engine=False, problem=outcome.detail)
        for outcome in outcomes
    ]


def judge(
    seen: Observed,
    row: ServerRow,
    record: InDoubt | None,
    weights: FleetWeights,
    *,
    ours: bool,
) -> Finding:
    """Diagnose one server. `ours`: its process can be restarted. Pure."""
    name = seen.server
    replace: Action = Action.RESTART if ours else Action.QUARANTINE
    problem = seen.problem.removeprefix(f"{name}: ")
    if seen.state is not None and seen.state.given_up:
        return Finding(name, Condition.FAILED, problem, Action.RESTART)
    if seen.state is not None and seen.state.busy:
        return Finding(name, Condition.BUSY, seen.state)
    if not seen.engine:
        if seen.http:
            detail = f"its front end answers and its engine does not ({problem})"
            return Finding(name, Condition.STUCK, detail, replace)
        return Finding(name, Condition.UNREACHABLE, problem, replace)
    if record is not None and record.half_updated:
        return Finding(name, Condition.HALF_UPDATED, record.reason, Action.PUSH)
    if record is not None and record.woken:
        return Finding(name, Condition.WOKEN, record.reason, Action.SLEEP)
    compared = not row.quarantine and (row.weight_version or weights.version) is not None
    if seen.version_problem and (record is not None or compared):
        reason = seen.version_problem.removeprefix(f"{name}: ")
        return Finding(
            name, Condition.STUCK, f"its weight version cannot be read ({reason})", replace
        )
    back: Action = Action.RESTART if ours and weights.version is None else Action.PUSH
    if record is not None:
        return _judge_frozen(seen, row, record, weights, back, ours=ours)
    if row.quarantine:
        return Finding(
            name, Condition.QUARANTINED, row.quarantine, Action.RESTART if ours else Action.PUSH
        )
    foreign = foreign_version(row.weight_version, seen.version)
    if foreign and row.weight_version is not None:
        return Finding(name, Condition.WRONG_VERSION, foreign, back)
    # a server that skyctl did not start, and that no push reached, reports what it holds
    holds = row.weight_version or (None if ours else seen.version)
    if behind := _behind(holds, row, weights, ours=ours):
        return Finding(name, Condition.WRONG_VERSION, behind, back)
    if foreign and ours:  # perhaps a trainer that pushes by itself: not ours to repair
        return Finding(name, Condition.HEALTHY, foreign)
    if seen.sleep_level and not row.sleep_level:
        detail = f"asleep at level {seen.sleep_level}, which is not on record; type: skyctl wake"
        return Finding(name, Condition.HEALTHY, detail)
    if seen.paused and row.intended == "running":
        return Finding(name, Condition.HEALTHY, "paused, and not by skyctl; type: skyctl resume")
    return Finding(name, Condition.HEALTHY, row.intended if row.intended != "running" else "")


def _judge_frozen(
    seen: Observed,
    row: ServerRow,
    record: InDoubt,
    weights: FleetWeights,
    back: Action,
    *,
    ours: bool,
) -> Finding:
    """A server that a push froze, whose weights are whole; `back` brings it to the fleet's."""
    version = record.version or row.weight_version
    # the fleet moved on without it; a server that a push has touched belongs to the fleet
    if behind := _behind(version, row, weights, ours=True):
        return Finding(seen.server, Condition.WRONG_VERSION, behind, back)
    # it was restarted since, not by skyctl; a label that the push owes it is not on it yet
    restarted = not ours and not record.version and row.weight_version is not None
    if restarted and (foreign := foreign_version(row.weight_version, seen.version)):
        return Finding(seen.server, Condition.WRONG_VERSION, foreign, back)
    return Finding(seen.server, Condition.FROZEN, record.reason, Action.RESUME)


def _behind(version: str | None, row: ServerRow, weights: FleetWeights, *, ours: bool) -> str:
    """How a server's version differs from the fleet's, or "". Before a first push, a server that is
    not ours may have been started with anything.
    """
    if version is None and (not ours or weights.version is None):
        return ""
    if not ours and weights.version is None:
        return ""
    if version == weights.version:
        digests = row.checkpoint_digest, weights.checkpoint_digest
        other = all(digests) and digests[0] != digests[1] and row.weight_version == version
        return f"holds other files than the fleet under the label {version}" if other else ""
    return f"holds {version or 'the base weights'}, the fleet {weights.version or 'its base'}"
