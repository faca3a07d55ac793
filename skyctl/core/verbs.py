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
from skyctl.core.health import sleep_level
from skyctl.core.service import Control, Outcomes, Pause, Resume, Sleep, Wake
from skyctl.errors import ConflictError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus, fan_out
from skyctl.http.target import ServerTarget
from skyctl.store.adapters import is_current
from skyctl.store.in_doubt import in_doubt
from skyctl.store.state import FleetState, ServerRow
from skyctl.units import count_of

_ENDED = "verbs_ended"  # how many have; a pause and a resume may be under way at once


async def run(
    asked: Control,
    targets: Sequence[ServerTarget],
    *,
    client: ControlClient,
    state: FleetState,
    timeout_s: float,
    device: str = "",
) -> Outcomes:
    """Pause, resume, put to sleep or wake these servers, each within `timeout_s` unless the request
    has its own deadline.

    Returns one outcome per target, in their order; servers for which the verb is pointless are
    skipped and say why.

    Raises:
        ConflictError: waking would serve weights that a level-2 sleep discarded; or sleeping would
            have to wake them.
        StateUnwritable: resuming or waking, if the state with the quarantines cannot be read.
    """
    if isinstance(asked, Resume | Wake):
        state.require_read()
    timeout_s = asked.timeout_s or timeout_s
    known = {row.name: row for row in state.servers()}
    rows = {target.name: known.get(target.name, ServerRow(target.name)) for target in targets}
    if isinstance(asked, Resume | Wake):
        rows |= await _put_sleep_on_record(targets, rows, client, state, timeout_s)
    if isinstance(asked, Wake):
        _refuse_discarded(rows.values(), asked.tags, device)
    partly = {name for name, row in rows.items() if row.weights_awake}
    if isinstance(asked, Sleep) and device != "cpu":
        _refuse_empty([rows[name] for name in partly])
    doubted, before = in_doubt(state), _ended(state)
    skipped = {
        name: why
        for name, row in rows.items()
        if (why := pointless(asked, row, in_doubt=name in doubted))
    }
    called = [target for target in targets if target.name not in skipped]
    outcomes = await _call(asked, called, client, timeout_s, device, partly)
    woken, behind = [], {}
    if isinstance(asked, Wake):
        names = {o.server for o in outcomes if o.ok and o.value is not False}
        woken = [target for target in called if target.name in names]
        behind = await _quarantined_behind(woken, state, client, timeout_s)
    with state.transaction():
        number = count(state)
        meanwhile = number != before + 1 and isinstance(asked, Pause | Resume)
        changes = {o.server: _changes(asked, o, rows[o.server]) for o in outcomes if o.ok}
        if meanwhile:
            # what another verb recorded meanwhile stays, unless the server says otherwise
            now = {row.name: row.paused for row in state.servers()}
            changes = {
                name: one
                for name, one in changes.items()
                if now.get(name, False) == rows[name].paused
            }
        state.update_servers(changes)
        if called:
            state.add_event(*_event(asked, [_held_back(one, behind) for one in outcomes]))
    if meanwhile:
        outcomes = await _taken_last(asked, outcomes, state, called, client, number)
    # read again: another terminal may have resumed it meanwhile
    meant = {row.name for row in state.servers() if row.paused} if woken else ()
    if pause := [target for target in woken if target.name in meant]:
        await actions.pause(client, pause, mode="keep", timeout_s=timeout_s)
    found = {
        o.server: _held_back(_with_context(asked, o, rows[o.server]), behind) for o in outcomes
    }
    return tuple(
        found.get(t.name) or Outcome(t.name, OutcomeStatus.SKIPPED, 0.0, skipped[t.name])
        for t in targets
    )


def count(state: FleetState) -> int:
    """Count a verb that ended, or was recorded for a starting server; returns its number."""
    number = _ended(state) + 1
    state.set(_ENDED, str(number))
    return number


def _ended(state: FleetState) -> int:
    return int(state.get(_ENDED) or 0)


async def _call(
    asked: Control,
    targets: Sequence[ServerTarget],
    client: ControlClient,
    timeout_s: float,
    device: str,
    partly: Collection[str],
) -> Sequence[Outcome[Any]]:
    match asked:
        case Pause():
            return await actions.pause(
                client,
                targets,
                mode=asked.mode,
                clear_cache=asked.clear_cache,
                keep_partial=asked.keep_partial,
                timeout_s=timeout_s,
            )
        case Sleep(level=level):
            return await actions.sleep(
                client, targets, level=level, timeout_s=timeout_s, device=device, partly=partly
            )
        case Wake(tags=tags):
            return await actions.wake(client, targets, tags=tags, timeout_s=timeout_s)
    return await actions.resume(client, targets, timeout_s=timeout_s)


async def _taken_last(
    asked: Control,
    outcomes: Sequence[Outcome[Any]],
    state: FleetState,
    targets: Sequence[ServerTarget],
    client: ControlClient,
    number: int,
) -> Sequence[Outcome[Any]]:
    """Another pause or resume ended meanwhile: record which one each server says it took last."""
    meant, timeout_s = isinstance(asked, Pause), actions.READ_BACK_TIMEOUT_S

    async def ask(target: ServerTarget) -> bool:
        return await engines.server(client, target, timeout_s=timeout_s).is_paused()

    done = {outcome.server for outcome in outcomes if outcome.ok}
    found = await fan_out([t for t in targets if t.name in done], ask, timeout_s=timeout_s)
    paused = {one.server: bool(one.value) for one in found if one.ok}
    with state.transaction():
        if _ended(state) == number:  # a verb that ended after this one asked later
            state.update_servers({name: {"paused": now} for name, now in paused.items()})
    why = f"{'resumed' if meant else 'paused'} by another command meanwhile"
    return [
        replace(one, status=OutcomeStatus.FAILED, detail=why)
        if paused.get(one.server, meant) != meant
        else one
        for one in outcomes
    ]


async def _put_sleep_on_record(
    targets: Sequence[ServerTarget],
    rows: Mapping[str, ServerRow],
    client: ControlClient,
    state: FleetState,
    timeout_s: float,
) -> dict[str, ServerRow]:
    """Rows of servers found asleep without a record: the answer to a sleep may have been lost."""

    async def ask(target: ServerTarget) -> int:
        return await sleep_level(client, target, timeout_s)

    unknown = [target for target in targets if not rows[target.name].sleep_level]
    outcomes = await fan_out(unknown, ask, timeout_s=timeout_s)
    asleep = {one.server: one.value for one in outcomes if one.value}
    return {name: state.update_server(name, sleep_level=level) for name, level in asleep.items()}


async def _quarantined_behind(
    woken: Sequence[ServerTarget], state: FleetState, client: ControlClient, timeout_s: float
) -> dict[str, str]:
    """Give servers that woke the adapters they slept through. Those that do not take them are
    quarantined; returns why, by name.
    """
    from skyctl.adapters.committed import catch_up  # too heavy to import for a pause

    behind = [target for target in woken if not is_current(state, target.name)]
    failed = {
        one.server: f"not given the fleet's adapters: {one.detail}"
        for one in await catch_up(state, client, behind, timeout_s)
        if not one.ok
    }
    state.update_servers(
        {name: {"quarantine": f"{why}; type: skyctl recover"} for name, why in failed.items()}
    )
    return failed


def _held_back(outcome: Outcome[Any], behind: Mapping[str, str]) -> Outcome[Any]:
    """The outcome, failed for a server that woke `behind` the fleet's adapters."""
    if (why := behind.get(outcome.server)) is None:
        return outcome
    return replace(outcome, status=OutcomeStatus.FAILED, detail=f"awake, but quarantined: {why}")


def _event(asked: Control, outcomes: Sequence[Outcome[Any]]) -> tuple[str, str]:
    """Subject and message of the line of history: `pause (mode keep): 2 of 2 servers`."""
    said, ok = asked.describe(), sum(outcome.ok for outcome in outcomes)
    if len(outcomes) == 1:
        return outcomes[0].server, said if ok else f"{said} failed: {outcomes[0].detail}"
    return "fleet", f"{said}: {ok} of {count_of(len(outcomes), 'server')}"


def pointless(asked: Control, row: ServerRow, *, in_doubt: bool) -> str:
    """Why this server is skipped, or "". What a dead push left is not thawed by hand: waking thaws
    as well, unless only the weights of a sleeping server are woken; and so does putting one to
    sleep whose weights are awake.
    """
    weights_alone = bool(row.sleep_level) and isinstance(asked, Wake) and asked.tags == ("weights",)
    wakes_first = isinstance(asked, Sleep) and row.weights_awake
    thaws = (isinstance(asked, Resume | Wake) and not weights_alone) or wakes_first
    if thaws and (row.quarantine or in_doubt):
        why = row.quarantine or "it may hold parts of two checkpoints"
        return f"quarantined: {why}; type: skyctl recover"
    if isinstance(asked, Pause | Resume) and row.sleep_level:
        return "asleep; type: skyctl wake"
    return ""


def _with_context(asked: Control, outcome: Outcome[Any], before: ServerRow) -> Outcome[Any]:
    """The outcome, with what may surprise: it changed nothing, or not what one might expect."""
    more = ""
    if isinstance(asked, Resume) and not before.paused:
        more = "skyctl had not paused it"
    elif isinstance(asked, Wake) and not before.sleep_level:
        more = "it was not asleep"
    elif isinstance(asked, Wake) and before.paused and outcome.value is not False:
        more = "paused as before; type: skyctl resume"
    if not outcome.ok or not more:
        return outcome
    return outcome.noting(more)


def _refuse_discarded(rows: Iterable[ServerRow], tags: Sequence[str], device: str) -> None:
    discarded = [row.name for row in rows if row.sleep_level == 2]
    if not discarded or device == "cpu" or list(tags) == ["weights"]:
        return
    raise ConflictError(
        f"waking {', '.join(discarded)} would serve nothing: a level-2 sleep discarded the weights",
        hint="type: skyctl wake --tags weights; skyctl sync-weights CKPT; "
        "skyctl wake --tags kv_cache",
    )


def _refuse_empty(awake: Sequence[ServerRow]) -> None:
    """To sleep again, they would have to be awake for a moment, and generate from nothing."""
    empty = [row.name for row in awake if row.sleep_level == 2]
    if empty:
        raise ConflictError(
            f"the weights of {', '.join(empty)} are awake, and empty: a level-2 sleep discarded "
            "them",
            hint="push first: skyctl sync-weights CKPT",
        )


def _changes(asked: Control, outcome: Outcome[Any], before: ServerRow) -> dict[str, Any]:
    """The intended state of a server from now on, as fields of its row."""
    match asked:
        case Pause() | Resume():
            return {"paused": isinstance(asked, Pause)}
        case Sleep():  # a sleeping server ignores it: what it has discarded stays discarded
            level = max(asked.level, before.sleep_level)
            return {"sleep_level": level, "weights_awake": False}
        case Wake(tags=tags) if outcome.value is False:  # partly awake
            return {"weights_awake": True} if "weights" in tags else {}
    return {"sleep_level": 0, "weights_awake": False}
