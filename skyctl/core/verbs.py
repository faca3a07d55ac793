"""Freeze and thaw with a memory: run a control verb and record what is now meant to be true.

vLLM says `is_sleeping` of a server that is only paused, and a full wake resumes a paused one, so
the intended state is kept here and not read back from servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skyctl.core import actions as verbs
from skyctl.core.health import sleep_level
from skyctl.errors import ConflictError, UsageError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus, fan_out
from skyctl.http.target import ServerTarget
from skyctl.store.adapters import is_current
from skyctl.store.in_doubt import in_doubt
from skyctl.store.state import FleetState, ServerRow

VERBS = ("pause", "resume", "sleep", "wake")


async def run(
    verb: str,
    arguments: Mapping[str, Any],
    targets: Sequence[ServerTarget],
    *,
    client: ControlClient,
    state: FleetState,
    timeout_s: float,
    device: str = "",
) -> list[Outcome[Any]]:
    """pause {mode, clear_cache, keep_partial}, resume {}, sleep {level, mode} or wake {tags}.

    Returns one outcome per target, in their order; servers the verb makes no sense for are skipped
    and say why.

    Raises:
        ConflictError: waking would serve weights that a level-2 sleep discarded.
        StateUnwritable: resuming or waking, where the state that tells of quarantines cannot be
            read.
        UsageError: no such verb.
    """
    if verb in ("resume", "wake"):
        state.require_read()
    known = {row.name: row for row in state.servers()}
    rows = {target.name: known.get(target.name, ServerRow(target.name)) for target in targets}
    if verb == "wake":
        rows |= await _put_sleep_on_record(targets, rows, client, state, timeout_s)
        _refuse_discarded(rows.values(), arguments.get("tags") or (), device)
    doubted = in_doubt(state)
    skipped = {
        name: why
        for name, row in rows.items()
        if (why := _pointless(verb, arguments, row, in_doubt=name in doubted))
    }
    asked = [target for target in targets if target.name not in skipped]
    outcomes: list[Outcome[Any]]
    if verb == "pause":
        outcomes = [*await verbs.pause(client, asked, timeout_s=timeout_s, **arguments)]
    elif verb == "resume":
        outcomes = [*await verbs.resume(client, asked, timeout_s=timeout_s)]
    elif verb == "sleep":
        outcomes = [
            *await verbs.sleep(client, asked, timeout_s=timeout_s, device=device, **arguments)
        ]
    elif verb == "wake":
        outcomes = [*await verbs.wake(client, asked, timeout_s=timeout_s, **arguments)]
    else:
        raise UsageError(f"there is no verb {verb!r}")
    if verb == "wake":
        outcomes = await _with_adapters(outcomes, state, asked, client, timeout_s)
    with state.transaction():
        state.update_servers({o.server: _changes(verb, arguments, o) for o in outcomes if o.ok})
        if asked:
            state.add_event(*_event(verb, arguments, outcomes))
    if verb == "wake":
        await _pause_again(outcomes, state, asked, client, timeout_s)
    found = {o.server: _with_context(verb, o, rows[o.server]) for o in outcomes}
    return [
        found.get(t.name) or Outcome(t.name, OutcomeStatus.SKIPPED, 0.0, skipped[t.name])
        for t in targets
    ]


async def _put_sleep_on_record(
    targets: Sequence[ServerTarget],
    rows: Mapping[str, ServerRow],
    client: ControlClient,
    state: FleetState,
    timeout_s: float,
) -> dict[str, ServerRow]:
    """Rows of servers that sleep without our knowing: the answer to a sleep may have been lost."""

    async def ask(target: ServerTarget) -> int:
        return await sleep_level(client, target, timeout_s)

    unknown = [target for target in targets if not rows[target.name].sleep_level]
    outcomes = await fan_out(unknown, ask, timeout_s=timeout_s)
    asleep = {one.server: one.value for one in outcomes if one.value}
    return {name: state.update_server(name, sleep_level=level) for name, level in asleep.items()}


async def _with_adapters(
    outcomes: Sequence[Outcome[Any]],
    state: FleetState,
    targets: Sequence[ServerTarget],
    client: ControlClient,
    timeout_s: float,
) -> list[Outcome[Any]]:
    """Give servers that woke the adapters that they slept through; one that does not take them is
    quarantined."""
    from skyctl.adapters import catch_up  # much, for a command that pauses

    awake = {o.server for o in outcomes if o.ok and o.value is not False}
    behind = [t for t in targets if t.name in awake and not is_current(state, t.name)]
    failed = {
        one.server: f"not given the fleet's adapters: {one.detail}"
        for one in await catch_up(state, client, behind, timeout_s)
        if not one.ok
    }
    state.update_servers(
        {name: {"quarantine": f"{why}; type: skyctl recover"} for name, why in failed.items()}
    )
    return [
        replace(o, detail=f"quarantined: {failed[o.server]}") if o.server in failed else o
        for o in outcomes
    ]


def _event(
    verb: str, arguments: Mapping[str, Any], outcomes: Sequence[Outcome[Any]]
) -> tuple[str, str]:
    """Subject and message of the line of history: `pause (mode keep): 2 of 2 servers`."""
    how = [f"{key} {arguments[key]}" for key in ("mode", "level") if key in arguments]
    how += arguments.get("tags") or ()
    said = f"{verb} ({', '.join(how)})" if how else verb
    ok = sum(outcome.ok for outcome in outcomes)
    if len(outcomes) == 1:
        return outcomes[0].server, said if ok else f"{said} failed: {outcomes[0].detail}"
    return "fleet", f"{said}: {ok} of {len(outcomes)} servers"


def _pointless(verb: str, arguments: Mapping[str, Any], row: ServerRow, *, in_doubt: bool) -> str:
    """Why this server is not asked, or "". What a dead push left is not thawed by hand: waking
    thaws too, but for waking the weights alone of one that sleeps."""
    weights_alone = bool(row.sleep_level) and list(arguments.get("tags") or ()) == ["weights"]
    thaws = verb == "resume" or (verb == "wake" and not weights_alone)
    if thaws and (row.quarantine or in_doubt):
        why = row.quarantine or "it may hold parts of two checkpoints"
        return f"quarantined: {why}; type: skyctl recover"
    if verb in ("pause", "resume") and row.sleep_level:
        return "asleep; type: skyctl wake"
    return ""


def _with_context(verb: str, outcome: Outcome[Any], before: ServerRow) -> Outcome[Any]:
    """The outcome, with what may surprise: it changed nothing, or not what one may expect."""
    more = ""
    if verb == "resume" and not before.paused:
        more = "skyctl had not paused it"
    elif verb == "wake" and not before.sleep_level:
        more = "it was not asleep"
    elif verb == "wake" and before.paused and outcome.value is not False:
        more = "paused as before; type: skyctl resume"
    if not outcome.ok or not more:
        return outcome
    return replace(outcome, detail=f"{outcome.detail}; {more}" if outcome.detail else more)


def _refuse_discarded(rows: Any, tags: Sequence[str], device: str) -> None:
    discarded = [row.name for row in rows if row.sleep_level == 2]
    if not discarded or device == "cpu" or list(tags) == ["weights"]:
        return
    raise ConflictError(
        f"waking {', '.join(discarded)} would serve nothing: a level-2 sleep discarded the weights",
        hint="type: skyctl wake --tags weights; skyctl sync-weights CKPT; "
        "skyctl wake --tags kv_cache",
    )


def _changes(verb: str, arguments: Mapping[str, Any], outcome: Outcome[Any]) -> dict[str, Any]:
    """What is meant to be true of a server from now on, as fields of its row."""
    if verb in ("pause", "resume"):
        return {"paused": verb == "pause"}
    if verb == "sleep":
        return {"sleep_level": arguments.get("level", 1), "weights_awake": False}
    if outcome.value is not False:  # False: awake in part only
        return {"sleep_level": 0, "weights_awake": False}
    return {"weights_awake": True} if "weights" in arguments.get("tags", ()) else {}


async def _pause_again(
    outcomes: Sequence[Outcome[Any]],
    state: FleetState,
    targets: Sequence[ServerTarget],
    client: ControlClient,
    timeout_s: float,
) -> None:
    # read anew: another terminal may have resumed it meanwhile
    meant = {row.name for row in state.servers() if row.paused}
    awake = {o.server for o in outcomes if o.ok and o.value is not False}
    paused = [t for t in targets if t.name in awake & meant]
    if paused:
        await verbs.pause(client, paused, mode="keep", timeout_s=timeout_s)
