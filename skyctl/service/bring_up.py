"""`up` as an operation: check, start the supervisor, reconcile, follow, undo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from skyctl.core.check import learn_arguments
from skyctl.core.plan import FleetPlan, config_digest
from skyctl.core.planning import (
    at_present,
    came_up_with_router,
    planned,
    usable,
    without_router,
)
from skyctl.core.recorded import down_error
from skyctl.core.registry import (
    FleetRef,
    kept_files,
    left_alone,
    refuse_another_file,
    remember,
    supervisor_running,
    was_attached,
)
from skyctl.core.requests import StatusQuery
from skyctl.core.service import FleetService
from skyctl.core.status import BY_DOWN, FleetStatus, OperationKind, ended_by_others
from skyctl.errors import (
    ConflictError,
    DeadlineExceeded,
    FleetDownError,
    NotFoundError,
    SkyctlError,
    VersionMismatch,
)
from skyctl.kill_points import reached
from skyctl.service.bring_down import after_down, attached_error, goes_down
from skyctl.service.revive import up_lock
from skyctl.service.supervised import SupervisedFleet
from skyctl.service.switching import take_gpus, would_sleep
from skyctl.store.in_doubt import in_doubt
from skyctl.store.locks import Locks
from skyctl.store.paths import FleetPaths
from skyctl.store.sleep_groups import SleepGroup
from skyctl.store.state import FleetState
from skyctl.supervisor import daemon
from skyctl.supervisor.interface import Reconcile, SupervisorClient, Undo
from skyctl.supervisor.reconcile import Preview, preview_of_rows

FOLLOW_POLL_S = 0.5


@dataclass(frozen=True)
class Begun:
    """What `begin_up` started. `operation` 0: the fleet already matched the plan."""

    operation: int
    plan: FleetPlan
    fresh: bool  # this call started the supervisor
    joined: bool  # another `up` began the operation


def refuse_attached(ref: FleetRef) -> None:
    """Raise UsageError for a fleet whose servers skyctl did not start."""
    if ref.config.attached:
        raise attached_error(ref.name)


def _forget_attached(ref: FleetRef) -> None:
    """The file listed servers before, and starts some now: those have other records.

    Raises:
        ConflictError: what skyctl did to the others must be undone first.
    """
    if not was_attached(ref.paths) or not ref.paths.database.exists():
        return
    with FleetState(ref.paths.database) as state:
        doubts = in_doubt(state)
        frozen = [
            row.name
            for row in state.servers()
            if row.intended != "running" or row.quarantine or row.name in doubts
        ]
        if frozen:
            raise ConflictError(
                f"fleet {ref.name} was attached to servers that are on record as paused, asleep or "
                f"quarantined: {', '.join(frozen)}",
                hint="give this one a `name:` of its own",
            )
        state.forget_run()


async def begin_up(
    ref: FleetRef,
    *,
    router: bool = True,
    parallel: int = 1,
    undo: bool = True,
    note: Callable[[str], None] = lambda line: None,
    request_id: str = "",
) -> Begun:
    """Check the plan, start the supervisor unless it runs, and hand it the plan. So many servers
    are restarted at a time (`parallel`); those that do not come back get their old settings again
    (`undo`). `note` receives what takes a while; `undo` takes the `request_id`.

    Raises:
        UsageError: the fleet is attached, or the plan has problems; nothing was started.
        ConflictError: the supervisor is busy with something other than a `down`, which is waited
            for; or the fleet sleeps (`sleep_group`).
    """
    refuse_attached(ref)
    ref.paths.prepare()
    reached("up.begin")
    await _after_down(ref)
    # outside the lock that the next `up` waits for
    await asyncio.to_thread(learn_arguments, ref.config, ref.base_dir, note)
    await _take_gpus(ref, router, note)
    given = (router, parallel, undo, request_id)
    try:
        return await _hand_over(ref, *given)
    except (ConflictError, FleetDownError) as error:
        # a `down` began, or ended, between the check and the request
        if not goes_down(error):
            raise
        await after_down(ref)
        await _take_gpus(ref, router, note)
        return await _hand_over(ref, *given)


async def _take_gpus(ref: FleetRef, router: bool, note: Callable[[str], None]) -> None:
    """Before a fleet starts whose group shares its GPUs, the one that is awake sleeps. One that
    runs has to be switched to.
    """
    if (group := _needed_from(ref)) is not None:
        usable(*await _planned(ref, router), ref.source)  # nobody sleeps for what cannot start
        await take_gpus(ref.name, group, note)


def _needed_from(ref: FleetRef) -> SleepGroup | None:
    group = ref.config.sleep_group
    if group is None or supervisor_running(ref.paths) or left_alone(ref.paths):
        return None
    return SleepGroup(ref.paths.root, group)


async def sleeps_first(ref: FleetRef) -> str:
    """The fleet that `begin_up` would put to sleep; "" if none."""
    group = _needed_from(ref)
    return await would_sleep(ref.name, group) if group is not None else ""


async def _hand_over(
    ref: FleetRef, router: bool, parallel: int, undo: bool, request_id: str
) -> Begun:
    # two `up` at once: the second plans with the ports the first has chosen
    async with up_lock(Locks(ref.paths.directory), "skyctl up"):
        plan = usable(*await _planned(ref, router), ref.source)
        _forget_attached(ref)
        remember(ref)
        fresh = await daemon.ensure_running(ref.paths)
        reached("up.supervised")
        async with SupervisorClient.on_this_machine(ref.paths) as client:
            begun = await client.reconcile(
                Reconcile(plan, parallel=parallel, undo=undo, request_id=request_id)
            )
            reached("up.sent")
    return Begun(begun.operation, plan, fresh, begun.joined)


async def preview_up(ref: FleetRef, *, router: bool = True) -> Preview:
    """What `begin_up` would do, after its checks; touches nothing.

    Raises:
        UsageError: the fleet is attached, or the plan has problems.
    """
    refuse_attached(ref)
    await asyncio.to_thread(learn_arguments, ref.config, ref.base_dir)
    return await preview_of(ref, usable(*await _planned(ref, router), ref.source))


async def preview_of(ref: FleetRef, plan: FleetPlan) -> Preview:
    """What `up` with this plan would do. Raises SkyctlError if the supervisor does not answer."""
    async with SupervisorClient.on_this_machine(ref.paths) as client:
        with suppress(FleetDownError):
            return await client.preview(Reconcile(plan))
    async with SupervisedFleet(ref) as fleet:
        return preview_of_rows(plan, (await fleet.processes()).rows)


async def earlier(ref: FleetRef) -> tuple[FleetRef, bool, Preview]:
    """What `rollout undo` returns to, whether with its router (not after `up --no-router`), and
    what it would do: the last applied file if the fleet differs from it, else the one before.

    Raises:
        FleetDownError: the fleet does not run.
        NotFoundError: no such file is kept.
        ConflictError: the fleet runs from another file of its name.
    """
    refuse_attached(ref)
    refuse_another_file(ref)
    async with SupervisedFleet(ref) as fleet:
        status = await fleet.status(StatusQuery(fresh=False))
    if not status.config_digest:
        raise down_error(ref.name)
    kept, digest = kept_files(ref), status.config_digest
    applied = [candidate.config for candidate in kept]
    router = came_up_with_router(applied, digest, len(status.replicas))
    for number, candidate in enumerate(kept):
        config = candidate.config if router else without_router(candidate.config)
        changes = await preview_of(candidate, (await _planned(candidate, router))[0])
        if number or changes.differs or config_digest(config) != digest:
            return candidate, router, changes
    raise NotFoundError(
        f"no earlier file of fleet {ref.name} is kept",
        hint="one is kept as soon as another was applied: skyctl up",
    )


async def _planned(ref: FleetRef, router: bool) -> tuple[FleetPlan, dict[str, int]]:
    """The plan of the file, with the ports and models that what runs keeps; and these ports."""
    async with SupervisedFleet(ref) as fleet:
        ports, pins = await fleet.kept()
    config = at_present(ref.config, ports)
    return planned(config, ref.base_dir, ports, pins=pins, router=router), ports


async def _after_down(ref: FleetRef) -> None:
    """Wait until a `down` in progress has ended, as long as it may take."""
    async with SupervisorClient.on_this_machine(ref.paths) as client:
        try:
            operation = (await client.status(StatusQuery(fresh=False))).operation
        except (FleetDownError, VersionMismatch):
            return
    if operation is not None and operation.under_way(OperationKind.DOWN):
        await after_down(ref)


class Superseded(SkyctlError):
    """Another operation took the place of the one being followed."""


async def follow_operation(
    fleet: FleetService,
    operation: int,
    on_status: Callable[[FleetStatus], None],
    *,
    timeout_s: float | None = None,
) -> FleetStatus:
    """Poll the status until the operation has ended; `on_status` receives each one.

    Raises:
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
        FleetDownError: the supervisor went away.
        SkyctlError: `down` ended it, and the supervisor with it, between two polls.
        Superseded: another operation took its place.
    """
    began_at = time.time()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            status = await fleet.status(StatusQuery(operation=operation))
        except FleetDownError as error:
            raise await _ended_by_down(fleet, began_at) or error from error
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
                hint="follow it: skyctl status --watch; or put it back: skyctl jobs cancel "
                f"{current.job}",
            )
        await asyncio.sleep(FOLLOW_POLL_S)


async def _ended_by_down(fleet: FleetService, since: float) -> SkyctlError | None:
    """The error, by the supervisor's record, of an operation that `down` ended since `since`."""
    try:
        events = [e for e in await fleet.events() if e.subject == "fleet" and e.at >= since]
    except FleetDownError:
        return None
    for event in reversed(events):
        kind, _, how = event.message.partition(": ")
        if how == BY_DOWN:
            return ended_by_others(kind, how)
    return None


async def undo(paths: FleetPaths, request_id: str) -> None:
    """Stop the operation that `begin_up` began, or was about to begin, and what that started."""
    async with SupervisorClient.on_this_machine(paths) as client:
        with suppress(FleetDownError):
            await client.undo(Undo(request_id))
