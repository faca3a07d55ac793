"""Recovery of a fleet that skyctl started: by its supervisor, which is started where it is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

from skyctl.core.diagnosis import Finding
from skyctl.core.recovery import Recovered
from skyctl.core.registry import FleetRef, supervisor_running
from skyctl.errors import ConflictError, FleetDownError, SkyctlError, VersionMismatch
from skyctl.service import left_alone
from skyctl.service.revive import UP_LOCK, UP_LOCK_WAIT_S, replace_other, revive
from skyctl.store.in_doubt import close_orphans
from skyctl.store.state import FleetState
from skyctl.supervisor.client import SupervisorClient

_ASK_TIMEOUT_S = 60.0
_SUPERVISORS = 5  # who keeps ending will not be the one that puts it right
_ROUNDS = 2  # what a supervisor finds when it takes over, and what it finds then


async def find(ref: FleetRef, client: SupervisorClient) -> tuple[Finding, ...]:
    """What is the matter with each server; nothing is started for it."""
    if not supervisor_running(ref.paths):
        return await left_alone.find(ref)
    try:
        answer = await client.get("/recover", timeout_s=_ASK_TIMEOUT_S)
    except VersionMismatch as error:
        return (Finding("supervisor", "other-version", error.message, "replace"),)
    except FleetDownError:  # it ended between
        return await left_alone.find(ref)
    return tuple(Finding.from_json(row) for row in answer["findings"])


async def recover(
    ref: FleetRef, client: SupervisorClient, *, timeout_s: float | None
) -> tuple[Recovered, ...]:
    """Put right what can be; one report per server.

    Raises:
        ConflictError: the supervisor is busy with something else.
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
    """
    began = time.monotonic()
    _close_orphans(ref)
    before = await find(ref, client)
    done, after = await _recovered(ref, client, timeout_s)
    now = {finding.server: finding for finding in after}
    seconds = time.monotonic() - began
    return tuple(
        done.get(one.server) or _report(one, now.get(one.server), seconds) for one in before
    )


async def _recovered(
    ref: FleetRef, client: SupervisorClient, timeout_s: float | None
) -> tuple[dict[str, Recovered], Sequence[Finding]]:
    """What was done, and what is the matter then; nothing where nobody lives to be put right.

    A supervisor that dies meanwhile is replaced once more: its servers live on.
    """
    from skyctl.service.bring_up import Superseded, after_down, goes_down

    done: dict[str, Recovered] = {}
    for _ in range(_SUPERVISORS):
        await replace_other(ref)
        await revive(ref)
        if not supervisor_running(ref.paths):
            if await _end_leftovers(ref):
                return {}, ()
            continue
        try:
            done |= await _by_supervisor(ref, client, timeout_s)
            return done, await find(ref, client)
        except Superseded:  # by the supervisor that came after it
            continue
        except (ConflictError, FleetDownError) as error:
            if not goes_down(error):
                raise
            await after_down(ref)
    raise SkyctlError(
        f"the supervisor of fleet {ref.paths.name} ended {_SUPERVISORS} times meanwhile",
        hint=f"its log says why: {ref.paths.supervisor_log}",
    )


async def _by_supervisor(
    ref: FleetRef, client: SupervisorClient, timeout_s: float | None
) -> dict[str, Recovered]:
    from skyctl.service.bring_up import follow_operation

    done: dict[str, Recovered] = {}
    for _ in range(_ROUNDS):
        operation = int((await client.post("/recover", {}))["operation"])
        await follow_operation(ref.paths, operation, lambda status: None, timeout_s=timeout_s)
        answer = await client.get("/recover", timeout_s=_ASK_TIMEOUT_S)
        rows = [Recovered.from_json(row) for row in answer["recovered"]]
        done |= {row.server: row for row in rows if row.action != "nothing"}
        if not any(row["action"] != "nothing" for row in answer["findings"]):
            break
    return done


def _close_orphans(ref: FleetRef) -> None:
    """Before anything slow: whoever follows a job learns at once that its process is dead."""
    if ref.paths.database.exists():
        with FleetState(ref.paths.database) as state:
            close_orphans(state)


async def _end_leftovers(ref: FleetRef) -> bool:
    """End what is left of a fleet of which no server lives; all of it, if it was going down.

    False, and nothing is touched, when something lives after all.
    """
    from skyctl.service.bring_up import take_down
    from skyctl.supervisor.rollout import host_of, stop_recorded

    with (
        FleetState(ref.paths.database) as state,
        # nobody starts or takes over meanwhile
        state.locks.hold(UP_LOCK, "ending what is left", wait_s=UP_LOCK_WAIT_S),
    ):
        going_down, rows = bool(state.get("going_down")), state.processes()
        if supervisor_running(ref.paths):
            return False
        if not going_down:
            if any(row.alive() for row in rows):
                return False
            for row in rows:
                await stop_recorded(row, host_of(state), ref.config.stop_timeout_s)
                state.mark_stale(row.name)
    if going_down:
        await take_down(ref.paths, drain_timeout_s=0.0, stop_timeout_s=ref.config.stop_timeout_s)
    return True


def _report(before: Finding, after: Finding | None, seconds: float) -> Recovered:
    """Of a server that recovery itself had nothing to do about: was taking over enough?"""
    if before.action == "nothing":
        return Recovered(before.server, before.found, "nothing", True, before.detail)
    ok = after is None or after.action == "nothing"
    detail = "" if after is None or ok else after.detail
    return Recovered(before.server, before.found, before.action, ok, detail, seconds)
