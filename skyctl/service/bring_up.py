"""`up` and `down` as operations: check, start the supervisor, reconcile, follow, undo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from skyctl.checkpoints.staging import sweep
from skyctl.core.check import learn_arguments
from skyctl.core.plan import FleetPlan
from skyctl.core.registry import FleetRef, remember
from skyctl.core.status import BY_DOWN, FleetStatus
from skyctl.errors import (
    ConflictError,
    DeadlineExceeded,
    FleetDownError,
    SkyctlError,
    UsageError,
)
from skyctl.kill_points import reached
from skyctl.service.ended import ended_by_others
from skyctl.service.planning import planned, usable
from skyctl.service.revive import UP_LOCK, UP_LOCK_WAIT_S
from skyctl.store.in_doubt import close_orphans
from skyctl.store.paths import FleetPaths
from skyctl.store.rebuild import unrecorded_processes
from skyctl.store.state import FleetState
from skyctl.supervisor import daemon
from skyctl.supervisor.client import SupervisorClient
from skyctl.supervisor.rollout import host_of, stop_recorded
from skyctl.supervisor.wire import plan_to_json

FOLLOW_POLL_S = 0.5


@dataclass(frozen=True)
class Begun:
    """What `begin_up` set in motion. `operation` 0: the fleet already was what the plan says."""

    operation: int
    plan: FleetPlan
    fresh: bool  # this call started the supervisor
    joined: bool  # another `up` began the operation


def refuse_attached(ref: FleetRef) -> None:
    """Raise UsageError for a fleet whose servers skyctl did not start."""
    if ref.config.attached:
        raise UsageError(
            f"fleet {ref.name} is attached: skyctl did not start its servers",
            hint="start and stop them where they are; look at them: skyctl status",
        )


async def begin_up(
    ref: FleetRef, *, router: bool = True, note: Callable[[str], None] = lambda line: None
) -> Begun:
    """Check the plan, start the supervisor unless it runs, and hand it the plan. `note` hears what
    takes a while.

    Raises:
        UsageError: the fleet is attached, or the plan has problems; nothing was started.
        ConflictError: the supervisor is busy with something else than a `down`, which is waited
            for.
    """
    refuse_attached(ref)
    ref.paths.prepare()
    reached("up.begin")
    await _after_down(ref)
    # not within the lock that the next `up` waits for
    await asyncio.to_thread(learn_arguments, ref.config, ref.base_dir, note)
    try:
        return await _hand_over(ref, router)
    except (ConflictError, FleetDownError) as error:
        # a `down` began between the look and the request, or ended between
        if not goes_down(error):
            raise
        await after_down(ref)
        return await _hand_over(ref, router)


async def _hand_over(ref: FleetRef, router: bool) -> Begun:
    with (
        FleetState(ref.paths.database) as state,
        # two `up` at once: the second plans with the ports the first has chosen
        state.locks.hold(UP_LOCK, "skyctl up", wait_s=UP_LOCK_WAIT_S),
    ):
        plan = usable(ref, planned(ref, router=router))
        remember(ref, state)
        fresh = await daemon.ensure_running(ref.paths)
        reached("up.supervised")
        client = SupervisorClient(ref.paths)
        try:
            answer = await client.post("/reconcile", {"plan": plan_to_json(plan)})
            reached("up.sent")
        finally:
            await client.close()
    return Begun(int(answer["operation"]), plan, fresh, bool(answer["joined"]))


async def _after_down(ref: FleetRef) -> None:
    """Wait until a `down` in progress has ended, as long as that may take."""
    with FleetState(ref.paths.database) as state:
        if not state.get("going_down"):
            return
    client = SupervisorClient(ref.paths)
    try:
        operation = (await client.get("/status?fresh=0"))["operation"]
    except FleetDownError:
        return
    finally:
        await client.close()
    if operation is not None and operation["kind"] == "down":
        await after_down(ref)


def goes_down(error: SkyctlError) -> bool:
    """Whether a supervisor refused, or was not there, because its fleet is brought down."""
    return isinstance(error, FleetDownError) or error.details.get("operation") == "down"


async def after_down(ref: FleetRef) -> None:
    """Wait until the supervisor, which is bringing its fleet down, has ended.

    Raises:
        SkyctlError: it takes longer than it may.
    """
    timeout_s = _down_timeout_s(ref.config.drain_timeout_s, ref.config.stop_timeout_s)
    await daemon.wait_gone(ref.paths, timeout_s)


def _down_timeout_s(drain_timeout_s: float, stop_timeout_s: float) -> float:
    """Draining, then TERM and KILL of every tree, side by side."""
    return drain_timeout_s + 2 * stop_timeout_s + 60.0


class Superseded(SkyctlError):
    """Another operation took the place of the one that was followed."""


async def follow_operation(
    paths: FleetPaths,
    operation: int,
    on_status: Callable[[FleetStatus], None],
    *,
    timeout_s: float | None = None,
) -> FleetStatus:
    """Poll the status until the operation has ended; `on_status` sees each one.

    Raises:
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
        FleetDownError: the supervisor went away.
        SkyctlError: `down` ended it, and the supervisor with it, between two looks.
        Superseded: another operation took its place.
    """
    began_at = time.time()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    client = SupervisorClient(paths)
    try:
        while True:
            status = FleetStatus.from_json(await client.get(f"/status?operation={operation}"))
            on_status(status)
            current = status.operation
            if current is None or current.id != operation:
                other = current.kind if current is not None else "another command"
                raise Superseded(
                    f"this was ended by `{other}` from elsewhere (another terminal?)",
                    hint="look: skyctl status",
                )
            if current.ended_at is not None:
                return status
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{current.kind} has not ended after {timeout_s:g} s; it goes on",
                    hint="follow it: skyctl status --watch; or end it: skyctl down",
                )
            await asyncio.sleep(FOLLOW_POLL_S)
    except FleetDownError as error:
        raise _ended_by_down(paths, began_at) or error from error
    finally:
        await client.close()


def _ended_by_down(paths: FleetPaths, since: float) -> SkyctlError | None:
    """What the supervisor recorded of an operation that `down` ended since then."""
    with FleetState(paths.database) as state:
        events = [e for e in state.events() if e.subject == "fleet" and e.at >= since]
    for event in reversed(events):
        kind, _, how = event.message.partition(": ")
        if how == BY_DOWN:
            return ended_by_others(kind, how)
    return None


async def undo(paths: FleetPaths) -> None:
    """Stop the operation in progress and what it started."""
    client = SupervisorClient(paths)
    try:
        await client.post("/undo", {}, timeout_s=120.0)
    except FleetDownError:
        return
    finally:
        await client.close()


@dataclass(frozen=True)
class TakenDown:
    """What `down` did. `stopped` names what ran; `supervised` says whether a supervisor did it."""

    stopped: tuple[str, ...]
    supervised: bool


async def take_down(
    paths: FleetPaths, *, drain_timeout_s: float, stop_timeout_s: float = 15.0
) -> TakenDown:
    """Bring a fleet down, through its supervisor or, when that is dead, without it. Idempotent.

    Raises:
        SkyctlError: something could not be stopped.
    """
    if not paths.database.exists():
        return TakenDown((), False)
    with FleetState(paths.database) as state:
        names = tuple(r.name for r in state.processes() if r.alive())
    client = SupervisorClient(paths)
    reached("down.asked")
    try:
        timeout_s = _down_timeout_s(drain_timeout_s, stop_timeout_s)
        await client.post("/down", {"drain_timeout_s": drain_timeout_s}, timeout_s=timeout_s)
        supervised = True
    except FleetDownError:
        supervised = False
    finally:
        await client.close()
    await daemon.wait_gone(paths)
    return TakenDown(names + await _stop_leftovers(paths, names, stop_timeout_s), supervised)


async def _stop_leftovers(
    paths: FleetPaths, known: tuple[str, ...], timeout_s: float
) -> tuple[str, ...]:
    """Stop every recorded tree that is still there; names that `known` does not have."""
    with FleetState(paths.database) as state:
        host = host_of(state)
        left = [*unrecorded_processes(state, paths.directory), *state.processes()]
        rows = list({row.token: row for row in left}.values())
        stopped = await asyncio.gather(*(stop_recorded(row, host, timeout_s) for row in rows))
        close_orphans(state)
        state.forget_run()
    for directory in (paths.staging, paths.adapters):
        await asyncio.to_thread(sweep, directory, ())
    await asyncio.to_thread(host.sweep, paths)
    paths.socket.unlink(missing_ok=True)
    found = tuple(row.name for row, had in zip(rows, stopped, strict=True) if had)
    return tuple(name for name in found if name not in known)
