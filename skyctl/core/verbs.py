"""Control verbs with a memory: run one, and record the state that is now intended.

vLLM reports `is_sleeping` for a server that is only paused, and a full wake resumes a paused one,
so the intended state is kept here instead of being read back from servers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyctl import engines
from skyctl.core import actions
from skyctl.core.recorded_sleep import put_sleep_on_record, rows_as_found
from skyctl.core.requests import Control, Outcomes, Pause, Resume, Sleep, Wake
from skyctl.errors import ConflictError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus, fan_out
from skyctl.http.target import FreezeOrder, ServerTarget
from skyctl.states import DISCARDED
from skyctl.store.adapters import is_current
from skyctl.store.in_doubt import InDoubt, clear_doubt, doubt_pause, in_doubt
from skyctl.store.state import FleetState, ServerRow
from skyctl.units import count_of

_ENDED = "verbs_ended"  # how many have; a pause and a resume may be under way at once


async def run(
    request: Control,
    targets: Sequence[ServerTarget],
    *,
    client: ControlClient,
    state: FleetState,
    timeout_s: float,
    device: str = "",
    undoes: bool = True,
    unrepaired: Mapping[str, str] = {},
) -> Outcomes:
    """Pause, resume, put to sleep or wake these servers, each within `timeout_s` unless the request
    has its own deadline. Unless it `undoes`, a pause that fails resumes no server: another fleet
    may have begun to push into it. Those in `unrepaired` are skipped for the reason given there.

    Returns one outcome per target, in their order; servers for which the verb is pointless are
    skipped and say why.

    Raises:
        ConflictError: waking would serve weights that a level-2 sleep discarded; or sleeping would
            have to wake them.
        StateUnwritable: resuming or waking, if the state with the quarantines cannot be read;
            putting to sleep, if it cannot be written. Nothing was called.
    """
    timeout_s = request.timeout_s or timeout_s
    if isinstance(request, Pause) and not undoes:
        request = replace(request, keep_partial=True)
    thaws = isinstance(request, Resume | Wake)
    if thaws:
        state.require_read()
    rows = await rows_as_found(targets, client, state)
    doubts, before = in_doubt(state), _ended(state)
    unfit = {name for name, row in rows.items() if _unfit(row, doubts.get(name))}
    if not isinstance(request, Pause):
        rows |= await put_sleep_on_record(
            targets, rows, unfit if thaws else (), client, state, timeout_s
        )
    if isinstance(request, Wake):
        refuse_discarded(rows.values(), request.tags, device)
    partly = {name for name, row in rows.items() if row.weights_awake}
    if isinstance(request, Sleep) and device != "cpu":
        _refuse_empty([rows[name] for name in partly])
    reasons = {name: pointless(request, row, doubts.get(name)) for name, row in rows.items()}
    skipped = {name: reason for name, reason in (reasons | dict(unrepaired)).items() if reason}
    called = [target for target in targets if target.name not in skipped]
    if isinstance(request, Resume) and request.force:
        await _take_over([t for t in targets if rows[t.name].sleep_level], client, timeout_s)
    if isinstance(request, Sleep) and called:
        _intend_sleep(partly.intersection(target.name for target in called), state)
    outcomes = await _call(request, called, client, timeout_s, device, partly, unfit)
    woken, behind = [], {}
    if isinstance(request, Wake):
        names = {o.server for o in outcomes if o.ok and o.value is not False}
        woken = [target for target in called if target.name in names]
        behind = await _quarantined_behind(woken, state, client, timeout_s)
    with state.transaction():
        number = count(state)
        meanwhile = number != before + 1 and isinstance(request, Pause | Resume)
        changes = {o.server: _changes(request, o, rows[o.server]) for o in outcomes if o.ok}
        if meanwhile:
            changes = _unless_recorded(changes, rows, state)
        _record(request, changes, outcomes, doubts, state)
        if called:
            state.add_event(*_event(request, [_held_back(outcome, behind) for outcome in outcomes]))
    if meanwhile:
        outcomes = await _taken_last(request, outcomes, state, called, client, number)
    if woken:
        await _pause_again(woken, state, client, timeout_s)
    ended = [_held_back(_with_context(request, o, rows[o.server]), behind) for o in outcomes]
    reported = {outcome.server: outcome for outcome in ended}
    return tuple(
        reported.get(t.name) or Outcome(t.name, OutcomeStatus.SKIPPED, 0.0, skipped[t.name])
        for t in targets
    )


def _intend_sleep(awake: Collection[str], state: FleetState) -> None:
    """Record that weights which are awake count as loaded no longer, before a sleep discards them:
    that it did is recorded afterwards, which may be lost. What was found before is recorded too.
    """
    with state.durable():
        state.update_servers({name: {"weights_awake": False} for name in awake})


def _unless_recorded(
    changes: Mapping[str, dict[str, Any]], rows: Mapping[str, ServerRow], state: FleetState
) -> dict[str, dict[str, Any]]:
    """The changes of servers whose pause no other verb has recorded meanwhile."""
    now = {row.name: row.paused for row in state.servers()}
    return {
        name: change
        for name, change in changes.items()
        if now.get(name, False) == rows[name].paused
    }


def _record(
    request: Control,
    changes: Mapping[str, Mapping[str, Any]],
    outcomes: Sequence[Outcome[Any]],
    doubts: Mapping[str, InDoubt],
    state: FleetState,
) -> None:
    """Record the intended states, and which servers a pause may have left frozen: the next verb
    that reaches one decides that.
    """
    state.update_servers(changes)
    for outcome in outcomes:
        name = outcome.server
        if outcome.ok and name in doubts and doubts[name].by_verb:
            clear_doubt(state, name)
        elif isinstance(request, Pause) and outcome.value:
            doubt_pause(state, name)


def count(state: FleetState) -> int:
    """Count a verb that ended, or was recorded for a starting server; returns its number."""
    number = _ended(state) + 1
    state.set(_ENDED, str(number))
    return number


def _ended(state: FleetState) -> int:
    return int(state.get(_ENDED) or 0)


async def _call(
    request: Control,
    targets: Sequence[ServerTarget],
    client: ControlClient,
    timeout_s: float,
    device: str,
    partly: Collection[str],
    unfit: Collection[str],
) -> Sequence[Outcome[Any]]:
    match request:
        case Pause():
            return await actions.pause(
                client,
                targets,
                mode=request.mode,
                clear_cache=request.clear_cache,
                keep_partial=request.keep_partial,
                unfit=unfit,
                timeout_s=timeout_s,
            )
        case Sleep(level=level):
            return await actions.sleep(
                client, targets, level=level, timeout_s=timeout_s, device=device, partly=partly
            )
        case Wake(tags=tags):
            return await actions.wake(client, targets, tags=tags, timeout_s=timeout_s)
    if isinstance(request, Resume) and request.force:
        targets = [replace(target, freeze=FreezeOrder.TAKE_OVER) for target in targets]
    return await actions.resume(client, targets, timeout_s=timeout_s)


async def _take_over(
    asleep: Sequence[ServerTarget], client: ControlClient, timeout_s: float
) -> None:
    """Make the freeze of sleeping servers this fleet's: a wake is not refused then."""
    targets = [replace(target, freeze=FreezeOrder.TAKE_OVER) for target in asleep]
    guarded = [target for target in targets if target.holder]
    await actions.pause(
        client, guarded, mode="keep", clear_cache=False, keep_partial=True, timeout_s=timeout_s
    )


async def _taken_last(
    request: Control,
    outcomes: Sequence[Outcome[Any]],
    state: FleetState,
    targets: Sequence[ServerTarget],
    client: ControlClient,
    number: int,
) -> Sequence[Outcome[Any]]:
    """Another pause or resume ended meanwhile: record which one each server says it took last."""
    pausing, timeout_s = isinstance(request, Pause), actions.READ_BACK_TIMEOUT_S

    async def ask(target: ServerTarget) -> bool:
        return await engines.server(client, target, timeout_s=timeout_s).is_paused()

    done = {outcome.server for outcome in outcomes if outcome.ok}
    answers = await fan_out([t for t in targets if t.name in done], ask, timeout_s=timeout_s)
    paused = {answer.server: bool(answer.value) for answer in answers if answer.ok}
    with state.transaction():
        if _ended(state) == number:  # a verb that ended after this one asked later
            state.update_servers({name: {"paused": now} for name, now in paused.items()})
    reason = f"{'resumed' if pausing else 'paused'} by another command meanwhile"
    return [
        replace(outcome, status=OutcomeStatus.FAILED, detail=reason)
        if paused.get(outcome.server, pausing) != pausing
        else outcome
        for outcome in outcomes
    ]


async def _pause_again(
    woken: Sequence[ServerTarget], state: FleetState, client: ControlClient, timeout_s: float
) -> None:
    """Pause servers that slept while they were paused, unless they were resumed meanwhile."""
    paused = {row.name for row in state.servers() if row.paused}
    if pause := [target for target in woken if target.name in paused]:
        await actions.pause(client, pause, mode="keep", timeout_s=timeout_s, keep_partial=True)


async def _quarantined_behind(
    woken: Sequence[ServerTarget], state: FleetState, client: ControlClient, timeout_s: float
) -> dict[str, str]:
    """Load into servers that woke the adapters that were changed while they slept. Those where that
    fails are quarantined; returns the reasons by name.
    """
    from skyctl.adapters.committed import catch_up  # too heavy to import for a pause

    behind = [target for target in woken if not is_current(state, target.name)]
    failed = {
        outcome.server: f"not given the fleet's adapters: {outcome.detail}"
        for outcome in await catch_up(state, client, behind, timeout_s)
        if not outcome.ok
    }
    state.update_servers(
        {name: {"quarantine": f"{reason}; type: skyctl recover"} for name, reason in failed.items()}
    )
    return failed


def _held_back(outcome: Outcome[Any], behind: Mapping[str, str]) -> Outcome[Any]:
    """The outcome, failed for a server that woke `behind` the fleet's adapters."""
    if (reason := behind.get(outcome.server)) is None:
        return outcome
    return replace(outcome, status=OutcomeStatus.FAILED, detail=f"awake, but quarantined: {reason}")


def _event(request: Control, outcomes: Sequence[Outcome[Any]]) -> tuple[str, str]:
    """Subject and message of the line of history: `pause (mode keep): 2 of 2 servers`."""
    description, ok = request.describe(), sum(outcome.ok for outcome in outcomes)
    if len(outcomes) == 1:
        return outcomes[
            0
        ].server, description if ok else f"{description} failed: {outcomes[0].detail}"
    return "fleet", f"{description}: {ok} of {count_of(len(outcomes), 'server')}"


def _unfit(row: ServerRow, doubted: InDoubt | None) -> str:
    """Why what this server holds must not answer, or ""."""
    of_push = doubted is not None and not doubted.by_verb
    return row.quarantine or ("it may hold parts of two checkpoints" if of_push else "")


def pointless(request: Control, row: ServerRow, doubted: InDoubt | None) -> str:
    """Why this server is skipped, or "". What a dead push left is not thawed by hand: waking thaws
    as well, unless only the weights of a sleeping server are woken; and so does putting one to
    sleep whose weights are awake.
    """
    weights_alone = (
        bool(row.sleep_level) and isinstance(request, Wake) and request.tags == ("weights",)
    )
    wakes_first = isinstance(request, Sleep) and row.weights_awake
    thaws = (isinstance(request, Resume | Wake) and not weights_alone) or wakes_first
    if thaws and (reason := _unfit(row, doubted)):
        return f"quarantined: {reason}; type: skyctl recover"
    if isinstance(request, Pause | Resume) and row.sleep_level:
        return "asleep; type: skyctl wake"
    first_cache = isinstance(request, Wake) and request.tags == ("kv_cache",)
    if first_cache and row.sleep_level and not row.weights_awake:  # waking them then would thaw it
        return "its weights sleep; first: skyctl wake --tags weights"
    return ""


def _with_context(request: Control, outcome: Outcome[Any], before: ServerRow) -> Outcome[Any]:
    """The outcome, with a note if it changed nothing, or not what the user may expect."""
    more = ""
    if isinstance(request, Resume) and not before.paused:
        more = "skyctl had not paused it"
    elif isinstance(request, Wake) and not before.sleep_level:
        more = "it was not asleep"
    elif isinstance(request, Wake) and before.paused and outcome.value is not False:
        more = "paused as before; type: skyctl resume"
    if not outcome.ok or not more:
        return outcome
    return outcome.noting(more)


def refuse_discarded(rows: Iterable[ServerRow], tags: Sequence[str], device: str) -> None:
    """Raise ConflictError if waking these `tags`, all if empty, would serve discarded weights."""
    discarded = [row.name for row in rows if row.sleep_level == DISCARDED]
    if not discarded or device == "cpu" or list(tags) == ["weights"]:
        return
    raise ConflictError(
        f"waking {', '.join(discarded)} would serve nothing: a level-2 sleep discarded the weights",
        hint="type: skyctl wake --tags weights; skyctl sync-weights CKPT; "
        "skyctl wake --tags kv_cache",
    )


def _refuse_empty(awake: Sequence[ServerRow]) -> None:
    """To sleep again, they would have to be awake for a moment, and generate from nothing."""
    empty = [row.name for row in awake if row.sleep_level == DISCARDED]
    if empty:
        raise ConflictError(
            f"the weights of {', '.join(empty)} are awake, and empty: a level-2 sleep discarded "
            "them",
            hint="push first: skyctl sync-weights CKPT",
        )


def _changes(request: Control, outcome: Outcome[Any], before: ServerRow) -> dict[str, Any]:
    """The intended state of a server from now on, as fields of its row."""
    match request:
        case Pause() | Resume():
            return {"paused": isinstance(request, Pause)}
        case Sleep():  # a sleeping server ignores it: what it has discarded stays discarded
            level = max(request.level, before.sleep_level)
            return {"sleep_level": level, "weights_awake": False}
        case Wake(tags=tags) if outcome.value is False:  # partly awake
            recorded = "weights" in tags and before.sleep_level  # else the next verb looks at it
            return {"weights_awake": True} if recorded else {}
    return {"sleep_level": 0, "weights_awake": False}
