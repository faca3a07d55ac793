"""`down`, with or without a supervisor, and how other commands treat a fleet that is going down."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

from skyctl.checkpoints.staging import sweep
from skyctl.core.registry import FleetRef, supervisor_running, was_attached
from skyctl.core.requests import Down, TakenDown
from skyctl.errors import FleetDownError, SkyctlError, UsageError
from skyctl.kill_points import reached
from skyctl.service.revive import end_stopped_processes, up_lock
from skyctl.store.in_doubt import close_orphans
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor import daemon
from skyctl.supervisor.interface import SupervisorClient
from skyctl.supervisor.rollout import host_of, raise_all, stop_recorded


def goes_down(error: SkyctlError) -> bool:
    """Whether a supervisor refused, or was absent, because its fleet is being taken down."""
    return isinstance(error, FleetDownError) or error.details.get("operation") == "down"


def attached_error(name: str) -> UsageError:
    """The error of `up`, `down` and the like on a fleet whose servers skyctl did not start."""
    return UsageError(
        f"fleet {name} is attached: skyctl did not start its servers",
        hint="start and stop them where they are; look at them: skyctl status",
    )


async def after_down(ref: FleetRef) -> None:
    """Wait until the supervisor, which is taking its fleet down, has ended.

    Raises:
        SkyctlError: it takes longer than it may.
    """
    timeout_s = _down_timeout_s(ref.config.drain_timeout_s, ref.config.stop_timeout_s)
    await daemon.wait_gone(ref.paths, timeout_s)


def _down_timeout_s(drain_timeout_s: float, stop_timeout_s: float) -> float:
    """Draining, then TERM and KILL of every process tree, in parallel."""
    return drain_timeout_s + 2 * stop_timeout_s + 60.0


async def take_down(
    paths: FleetPaths, *, drain_timeout_s: float, stop_timeout_s: float = 15.0
) -> TakenDown:
    """Take a fleet down, through its supervisor or, if that is dead, without it. Idempotent.

    Raises:
        UsageError: skyctl did not start its servers: what it has frozen must stay on record.
        SkyctlError: something could not be stopped.
        ConflictError: an `up` that is under way does not end its part in time.
    """
    if was_attached(paths):
        raise attached_error(paths.name)
    if not paths.database.exists():
        return TakenDown((), False)
    reached("down.asked")
    taken = TakenDown((), False)
    leftovers = None
    while leftovers is None and not taken.supervised:
        async with SupervisorClient.on_this_machine(paths) as client:
            await end_stopped_processes(paths)
            with suppress(FleetDownError):
                wait_s = _down_timeout_s(drain_timeout_s, stop_timeout_s)
                taken = await client.down(Down(drain_timeout_s, wait_s))
        await daemon.wait_gone(paths)
        leftovers = await _stop_leftovers(paths, stop_timeout_s)
    stopped = dict.fromkeys((*taken.stopped, *(leftovers or ())))
    return TakenDown(tuple(stopped), taken.supervised)


async def _stop_leftovers(paths: FleetPaths, timeout_s: float) -> tuple[str, ...] | None:
    """Stop every recorded process tree that still exists; returns their names. None, and nothing is
    touched, if another supervisor was started meanwhile: these are its processes.
    """
    async with AsyncExitStack() as stack:
        state = stack.enter_context(FleetState(paths.database))
        await stack.enter_async_context(up_lock(state.locks, "skyctl down"))
        if supervisor_running(paths):
            return None
        host = host_of(state)
        trees = [*state.unrecorded_processes(), *state.processes()]
        rows = list({row.token: row for row in trees}.values())
        state.set("going_down", "1")  # if one cannot be ended, the next `down` goes on
        stopped = await asyncio.gather(
            *(stop_recorded(row, host, timeout_s) for row in rows), return_exceptions=True
        )
        raise_all(stopped)
        close_orphans(state)
        state.forget_run()
        for directory in (paths.staging, paths.adapters):
            await asyncio.to_thread(sweep, directory, ())
        paths.leave_shared()
        await asyncio.to_thread(host.sweep, paths)
        paths.socket.unlink(missing_ok=True)
    return tuple(row.name for row, had in zip(rows, stopped, strict=True) if had)


async def end_leftovers(ref: FleetRef) -> bool:
    """End what is left of a fleet without live servers; all of it, if it was going down.

    False, and nothing is touched, if something is alive after all.
    """
    async with AsyncExitStack() as stack:
        state = stack.enter_context(FleetState(ref.paths.database))
        # no other command may start or take over meanwhile
        await stack.enter_async_context(up_lock(state.locks, "ending what is left"))
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
