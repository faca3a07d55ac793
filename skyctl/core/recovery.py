"""Recover a fleet: resume what is only frozen, push what is half updated, restart the rest.

    frozen        close its session, check its digest, resume        ─┐ when that fails
    woken         the same, and it sleeps again                      ─┤
    half-updated  scrub it; repeat the interrupted push into all    ◄─┘
                  └─ impossible: push the fleet's weights to it alone
                     └─ in no file: resume those that still have them, which write them for the rest
                        └─ impossible: restart it, or leave it quarantined

Nothing is resumed before it is known what it holds, nor while a trainer may still send to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from skyctl import engines
from skyctl.core.findings import Action, Condition, Finding
from skyctl.core.health import settled_sleep_level
from skyctl.core.repeated import interrupted_request
from skyctl.engines.base import Refusal, Server
from skyctl.errors import ServerError, SkyctlError, StateUnwritable, WeightsGone
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.push.request import PushRequest
from skyctl.push.sleeping import back_to_sleep, wake_weights_alone
from skyctl.push.verify import weights_digest
from skyctl.states import DISCARDED, PushStage
from skyctl.store.in_doubt import (
    InDoubt,
    clear_doubt,
    held_by,
    in_doubt,
    leave_to_next_push,
    put_in_doubt,
    why_held,
)
from skyctl.store.journal import Job
from skyctl.store.state import FleetState

_ROOM_AGAIN = "then type: skyctl recover"


@dataclass(frozen=True)
class Recovered:
    """What was done about one server."""

    server: str
    """Its name."""
    condition: Condition
    """What was wrong with it."""
    action: Action
    """What was done."""
    ok: bool
    """It serves as intended, or nothing was wrong."""
    detail: str = ""
    """Why it does not, or what was noticed."""
    seconds: float = 0.0
    """How long it took."""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"server": fields.pop("server"), "found": fields.pop("condition"), **fields}


class Actions(Protocol):
    """What recovery can do to one fleet: by its supervisor, or from outside."""

    state: FleetState
    client: ControlClient
    control_timeout_s: float
    targets: Mapping[str, ServerTarget]

    async def push(self, request: PushRequest, servers: Collection[str]) -> Job:
        """Push into these servers only, those that can take it; returns the ended job."""

    async def bring(self, name: str) -> None:
        """Push the fleet's weights into this server alone. Raises SkyctlError."""

    async def replace(self, name: str, reason: str) -> str:
        """Restart a server, or quarantine one that is not ours; returns why it is not back."""

    def waits(self, name: str, reason: str) -> None:
        """Leave a server quarantined, with a reason that says what to type."""


class _Case:
    """One server on its way through recovery."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.name = finding.server
        self.action: Action = finding.action
        self.problem = ""
        self.began = time.monotonic()
        self.ended: float | None = None

    def done(self, problem: str = "") -> None:
        self.problem = problem
        self.ended = time.monotonic()

    def report(self) -> Recovered:
        taken_s = (self.ended or time.monotonic()) - self.began
        return Recovered(
            self.name, self.finding.condition, self.action, not self.problem, self.problem, taken_s
        )


async def recover(findings: Sequence[Finding], actions: Actions) -> list[Recovered]:
    """Do what the findings call for, and write it into the fleet's history; one report per server,
    in their order. Never raises.
    """
    cases = [_Case(finding) for finding in findings]
    reached("recover.begin")
    _leave_held(cases, actions)
    chosen = [case for case in cases if case.action.releases]
    await asyncio.gather(*(_release_one(case, actions) for case in chosen))
    # those that are restarted need no pause
    kept = [c for c in cases if c.ended is None and c.action in (Action.PUSH, Action.QUARANTINE)]
    await asyncio.gather(*(_keep_frozen(case, actions) for case in kept))
    # servers that cannot take part are replaced or quarantined below: none stays at older weights
    able = [case.name for case in cases if not case.action.replaces]
    await _push([case for case in cases if case.action is Action.PUSH], able, actions)
    remaining = [case for case in cases if case.ended is None]
    chosen = [case for case in remaining if case.action.replaces]
    await _replace(chosen, actions)
    recovered = [case.report() for case in cases]
    for repair in recovered:
        if repair.action.needed:
            problem = f"could not be put right: {repair.detail}"
            end = f"done: {repair.action}" if repair.ok else problem
            actions.state.add_event(repair.server, f"recover: was {repair.condition}; {end}")
    return recovered


def _leave_held(cases: Sequence[_Case], actions: Actions) -> None:
    """Leave servers of a living trainer as they are until it has ended."""
    process, names = held_by(actions.state) or (None, ())
    for case in cases:
        if process is not None and case.name in names and case.action.needed:
            case.action = Action.QUARANTINE
            then = f"once it has left its update, or was ended (kill {process.pid}): skyctl recover"
            _wait([case], actions, SkyctlError(why_held(process)), then)


async def _replace(cases: Sequence[_Case], actions: Actions) -> None:
    """Replace servers that still serve one after the other, the rest at once."""

    async def replace_one(case: _Case) -> None:
        case.done(await actions.replace(case.name, case.problem or case.finding.detail))

    serving = [case for case in cases if case.finding.condition is Condition.WRONG_VERSION]
    await asyncio.gather(*(replace_one(case) for case in cases if case not in serving))
    for case in serving:
        await replace_one(case)


async def _release_one(case: _Case, actions: Actions) -> None:
    record = in_doubt(actions.state).get(case.name)
    if record is None:
        return case.done()  # repaired meanwhile
    target, timeout_s = actions.targets[case.name], actions.control_timeout_s
    server = engines.server(actions.client, target, timeout_s=timeout_s)
    row = actions.state.server(case.name)
    reported = await settled_sleep_level(actions.client, target, timeout_s)
    partly = record.woken or row.weights_awake  # some of those report that they are awake
    # a sleep that could not be put on record: resumed, it would run without its memory
    level = row.sleep_level if row.sleep_level and partly else max(row.sleep_level, reported or 0)
    if level != DISCARDED and reported == 0 and not partly:
        level = 0  # its wake was killed before it was recorded, or it was started again
    slept = max(1, level) if record.woken else 0
    digest, label = record.digest or row.weights_digest, record.version
    if record.half_updated:  # what a push before it had left may have been weighed
        digest, label = row.weights_digest, row.weight_version or ""
    if level and not partly:  # its memory may be unmapped
        if level == DISCARDED or (PushStage(record.stage).before_sessions and not label):
            digest = ""
        else:  # its weights are woken, to look at them
            slept = level
    try:
        await release(
            server,
            stage=record.stage,
            thaw=record.thaw and not row.paused and not level,
            digest=digest,
            label=label,
            timeout_s=timeout_s,
            slept=slept,
            wakes=slept > 0 or (level > 0 and row.weights_awake),
        )
    except SkyctlError as error:
        refusal = error.refusal if isinstance(error, ServerError) else ""
        if record.by_verb and refusal == Refusal.FROZEN_BY_ANOTHER:  # and that fleet thaws it
            clear(actions.state, case.name)
            case.action = Action.NOTHING
            return case.done()
        put_in_doubt(actions.state, {case.name: replace(record, half_updated=True)})
        case.action, case.problem = Action.PUSH, error.message
        return None
    changes: dict[str, Any] = {"sleep_level": max(level, slept)}
    if slept:
        changes["weights_awake"] = slept == DISCARDED
    with actions.state.transaction():
        clear(actions.state, case.name)
        actions.state.update_server(case.name, **changes)
    return case.done()


async def _keep_frozen(case: _Case, actions: Actions) -> None:
    """Freeze a server that another program has thawed, and that is half updated, holds nothing or
    lacks the label of what it holds: the push may not come about.
    """
    record, target = in_doubt(actions.state).get(case.name), actions.targets.get(case.name)
    half = record is not None and record.half_updated
    slept = actions.state.server(case.name).sleep_level
    empty = case.finding.condition is Condition.HALF_UPDATED and slept == DISCARDED and not half
    if empty:
        record = InDoubt(case.name, "recovery", PushStage.UPDATE, half_updated=True, thaw=True)
    if record is None or target is None or not (record.half_updated or record.version):
        return
    server = engines.server(actions.client, target, timeout_s=actions.control_timeout_s)
    with suppress(ServerError):  # an engine that is stuck carries out the pause once it goes on
        if await server.is_paused():
            return
    with suppress(StateUnwritable), actions.state.transaction():
        thaws = replace(record, thaw=not actions.state.server(case.name).paused)
        put_in_doubt(actions.state, {case.name: thaws})  # the push is to thaw it again
        if empty:
            actions.state.update_server(case.name, sleep_level=0, weights_awake=False)
    with suppress(ServerError):
        await server.pause("abort", clear_cache=False)


async def _push(cases: Sequence[_Case], able: Collection[str], actions: Actions) -> None:
    """Repeat the interrupted push, in all that are `able`; otherwise push the fleet's weights, one
    by one.
    """
    open_cases = list(cases)
    request = interrupted_request(actions.state)
    if request is not None and any(case.name in in_doubt(actions.state) for case in open_cases):
        doubted = set(in_doubt(actions.state))
        try:
            job = await actions.push(request, able)
        except StateUnwritable as error:
            _wait(open_cases, actions, error, _ROOM_AGAIN)
            return
        problem = "" if job.error is None else str(job.error["message"])
        open_cases = _still_open(open_cases, actions, problem, doubted)
    gone = [(case, reason) for case in open_cases if (reason := await _bring(case, actions))]
    released = [case for case, _ in gone if await _release_whole(case, actions)]
    for case, reason in gone:
        if case in released:
            continue
        # one that was released may write what no file has
        missing = await _bring(case, actions) if released else reason
        if missing is not None:
            # a directory that is overwritten at every step: a restarted server could not get its
            # fleet's weights either, and the next push scrubs this one
            leave_to_next_push(actions.state, case.name)
            _wait([case], actions, missing, "push or update again: skyctl sync-weights CKPT")


async def _bring(case: _Case, actions: Actions) -> WeightsGone | None:
    """Push the fleet's weights into one server; returns why they are not to be had."""
    try:
        await actions.bring(case.name)
        clear(actions.state, case.name)
        case.done()
    except StateUnwritable as error:  # untouched; a restart would lose what it holds
        _wait([case], actions, error, _ROOM_AGAIN)
    except WeightsGone as error:
        return error
    except SkyctlError as error:
        case.action = Action.RESTART
        case.problem = error.message  # the interrupted push's record has why that was not repeated
    return None


async def _release_whole(case: _Case, actions: Actions) -> bool:
    """Release a server that a dead trainer had sent nothing yet, and that has the fleet's weights:
    no file has them. Returns whether that was so.
    """
    record, row = in_doubt(actions.state).get(case.name), actions.state.server(case.name)
    weights = actions.state.weights_of(case.name)
    current = row.weight_version == weights.version
    current = current and row.checkpoint_digest == weights.checkpoint_digest
    # of one that discarded its weights no digest is compared
    if record is None or not row.weights_digest or not current or row.sleep_level == DISCARDED:
        return False
    if not record.half_updated and record.digest not in ("", row.weights_digest):
        return False  # restarted by another program before that push: it held something else
    await _release_one(case, actions)
    if case.ended is not None:
        case.action = Action.RESUME
    return case.ended is not None


def _wait(cases: Sequence[_Case], actions: Actions, error: SkyctlError, then: str) -> None:
    """Leave these servers quarantined; `then` is what to type."""
    reason = "; ".join(part for part in (error.message, error.hint, then) if part)
    for case in cases:
        actions.waits(case.name, reason)
        case.done(reason)


def _still_open(
    cases: Sequence[_Case], actions: Actions, problem: str, doubted: Collection[str]
) -> list[_Case]:
    """The cases that the push did not repair. A push clears the doubt about those in `doubted`; the
    others it repaired only if it succeeded.
    """
    remaining, listed = [], in_doubt(actions.state)
    for case in cases:
        failed = bool(problem) and case.name not in doubted
        if failed or case.name in listed or actions.state.server(case.name).quarantine:
            case.problem = problem
            remaining.append(case)
        else:
            case.done()
    return remaining


def clear(state: FleetState, name: str) -> None:
    """Clear this server: no doubt, no quarantine."""
    with state.transaction():
        clear_doubt(state, name)
        state.update_server(name, quarantine=None)


async def release(
    server: Server,
    *,
    stage: str,
    thaw: bool,
    digest: str | None,
    timeout_s: float,
    label: str = "",
    slept: int = 0,
    wakes: bool = False,
) -> None:
    """Close the session that a push left open at `stage`, and resume the server if `thaw`.

    `digest` is what its weights must have, None if unknown: then only a server to which nothing can
    have been sent is released. `label` is the version they get, if they do not have it yet. `slept`
    is the level at which it slept before the push woke its weights, 0 if it did not: it sleeps
    again afterwards, unless that sleep had discarded its weights, which stay awake, and empty. With
    `wakes` its weights are woken first: the push may have died before they were.

    Raises:
        ServerError: it does not answer, or is not known to hold what it held before: do not resume
            it.
    """
    name = server.target.name
    if not digest and not PushStage(stage).before_bytes:
        raise ServerError(f"{name}: what its weights were before the push is unknown")
    if wakes:
        await wake_weights_alone(server)
    # nothing would show that an earlier push left a session open
    if not (PushStage(stage).before_sessions and digest):
        try:
            await server.finish_weight_update(timeout_s=timeout_s)
        except ServerError as error:
            if error.refusal not in (Refusal.NO_SESSION, Refusal.NO_TRANSFER):
                raise
    # weights that a label is for were verified after the sleep that had discarded others
    if digest and (label or slept != DISCARDED):
        current = (await weights_digest(server, timeout_s=timeout_s)).digest
        if current != digest:
            raise ServerError(
                f"{name}: its weights are not what they were (digest {current}, before {digest})"
            )
    if label:
        await server.set_weight_version(label)
    if slept:
        if slept != DISCARDED:
            await back_to_sleep(server, slept)
    elif thaw:
        await server.resume()
