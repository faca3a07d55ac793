"""Which fleet of a group that shares its GPUs is awake: `switch`, and `up` of another fleet.

    the one awake drains and sleeps ─► the group names the next ─► it wakes, and is routed

Each step is repeated by the next `switch` if this process dies in between: at most one is awake.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from skyctl.core.registry import FleetRef, known_fleets, left_alone, select, supervisor_running
from skyctl.core.requests import Outcomes, Sleep, StatusQuery, Wake
from skyctl.core.service import FleetService
from skyctl.core.status import FleetStatus, OperationKind, ReplicaStatus
from skyctl.core.verbs import refuse_discarded
from skyctl.errors import (
    ConflictError,
    DeadlineExceeded,
    FleetDownError,
    NotFoundError,
    SkyctlError,
    UsageError,
)
from skyctl.http.fanout import OutcomeStatus
from skyctl.kill_points import reached
from skyctl.service import connect
from skyctl.service.bring_down import after_down, goes_down
from skyctl.service.revive import up_lock
from skyctl.states import ReplicaState
from skyctl.store.locks import Locks
from skyctl.store.paths import FleetPaths, fleet_paths
from skyctl.store.sleep_groups import SleepGroup
from skyctl.store.state import FleetState
from skyctl.supervisor.rollout import host_of
from skyctl.units import format_seconds

_POLL_S = 0.25
_Note = Callable[[str], None]


@dataclass(frozen=True)
class Switched:
    """What a switch did, or would do."""

    name: str
    """The fleet that is awake now."""
    sleep_group: str
    """The group of fleets that share their GPUs."""
    slept: str | None
    """The fleet that was put to sleep for it; None if none was awake."""
    seconds: float
    """How long it took."""


async def switch(
    ref: FleetRef,
    *,
    timeout_s: float | None = None,
    dry_run: bool = False,
    note: _Note = lambda line: None,
) -> Switched:
    """Put the fleet of the group that is awake to sleep, and wake this one; returns once all its
    servers take part. `timeout_s` bounds how long those that have to start again are waited for.

    Raises:
        UsageError: it is in no group.
        FleetDownError: it is down.
        ConflictError: the fleet that is awake is busy, or another switch is under way.
        SkyctlError: a server does not sleep, or does not wake.
    """
    began, name = time.monotonic(), ref.name
    reached("switch.begin")
    async with connect(ref) as fleet:
        status = await fleet.status(StatusQuery(fresh=False))
        group = SleepGroup(ref.paths.root, _group_of(ref, status))
        if group.awake() != name:
            _refuse_unable(ref, status)
        slept = await (would_sleep(name, group) if dry_run else take_gpus(name, group, note))
        if not dry_run:
            reached("switch.taken")
            note(f"waking {name}")
            wake = Wake(timeout_s=ref.config.weight_transfer.update_timeout_s)
            outcomes = await fleet.control(wake)
            _refuse_asleep(await _started(fleet, timeout_s), outcomes)
    other = slept if slept not in ("", name) else None
    return Switched(name, group.name, other, round(time.monotonic() - began, 3))


def _group_of(ref: FleetRef, status: FleetStatus) -> str:
    if status.sleep_group is not None:
        return status.sleep_group.name
    if status.supervised or ref.config.sleep_group is None:
        raise UsageError(
            f"fleet {ref.name} is in no group of fleets that share their GPUs",
            hint="write `sleep_group: NAME` into the file of each; then skyctl down, skyctl up",
        )
    if status.replicas:  # no supervisor can take its servers over
        raise FleetDownError("; ".join(reason.message for reason in status.reasons))
    file = "".join(f" -f {path}" for path in ref.files)
    raise FleetDownError(
        f"fleet {ref.name} is down",
        hint=f"start it, the one awake sleeps first: skyctl up{file}",
    )


def _refuse_unable(ref: FleetRef, status: FleetStatus) -> None:
    """Raise SkyctlError if no fleet is to sleep for one that could not serve then."""
    name, operation = status.name, status.operation
    down = operation is not None and operation.under_way(OperationKind.DOWN)
    if down or status.job:
        raise ConflictError(
            f"fleet {name} is busy: {status.job or 'down'}",
            hint=f"look: skyctl status --fleet {name}",
        )
    with FleetState(ref.paths.database) as state:
        rows = state.servers()
    hint = f"start it again: skyctl down --fleet {name}; then: skyctl up --fleet {name}"
    try:
        refuse_discarded(rows, (), status.device or "")
    except ConflictError as error:
        raise ConflictError(error.message, hint=hint) from error
    if all(replica.state.stuck for replica in status.replicas):
        problems = (f"{replica.name} is {replica.state}" for replica in status.replicas)
        raise SkyctlError(
            f"no server of fleet {name} could serve: {', '.join(problems)}", hint=hint
        )


async def would_sleep(name: str, group: SleepGroup) -> str:
    """The fleet that `take_gpus` would put to sleep for this one; "" if none. Raises as it does."""
    awake = group.awake()
    if awake in ("", name) or not _runs(awake):
        return ""
    async with connect(_leaving(awake)) as fleet:
        status = await fleet.status(StatusQuery(fresh=False))
    return awake if _has(group, status) else ""


async def take_gpus(name: str, group: SleepGroup, note: _Note) -> str:
    """Make this fleet the one that may be awake; returns the one that was put to sleep for it, ""
    if none was awake.

    Raises: as `switch`.
    """
    async with group.switching(f"skyctl switch {name}"):
        awake = group.awake()
        if awake == name:
            return ""
        if not awake:
            group.give(name)
            return ""
        if await _took_of_one_that_is_down(awake, name, group):
            return ""
        try:
            return awake if await _put_to_sleep(awake, name, group, note) else ""
        except (ConflictError, FleetDownError) as error:
            if not goes_down(error):
                raise
            await after_down(_leaving(awake))
            if not await _took_of_one_that_is_down(awake, name, group):
                raise
            return ""


async def _took_of_one_that_is_down(awake: str, name: str, group: SleepGroup) -> bool:
    paths = fleet_paths(awake)
    if not paths.directory.is_dir():
        group.give(name)
        return True
    # whoever starts its supervisor holds this
    async with up_lock(Locks(paths.directory), f"skyctl switch {name}"):
        if _runs(awake):
            return False
        group.give(name)
        return True


def _runs(awake: str) -> bool:
    """Raises ConflictError if the fleet is down, and yet something of it lives."""
    paths = fleet_paths(awake)
    if supervisor_running(paths) or left_alone(paths):
        return True
    if living := ", ".join(_living(paths)):
        raise ConflictError(
            f"fleet {awake} is not wholly down, and may use the GPUs: {living}",
            hint=f"skyctl down --fleet {awake}",
        )
    return False


def _living(paths: FleetPaths) -> list[str]:
    """What of a fleet without a supervisor has a process, if only one that its leader has left."""
    if not paths.database.exists():
        return []
    with FleetState(paths.database) as state:
        host, rows = host_of(state), [*state.processes(), *state.unrecorded_processes()]
    trees = ((row.name, host.adopt(row.identity, row.token, row.descendants)) for row in rows)
    return [f"{name} (pid {members[0].pid})" for name, tree in trees if (members := tree.members())]


async def _put_to_sleep(awake: str, name: str, group: SleepGroup, note: _Note) -> bool:
    """False: it is awake still, and in this group no more."""
    leaving = _leaving(awake)
    drain_s = leaving.config.drain_timeout_s
    request = Sleep(
        hands_to=name,
        sleep_group=group.name,
        drain_timeout_s=drain_s,
        timeout_s=leaving.config.weight_transfer.update_timeout_s,
    )
    async with connect(leaving) as fleet:
        status = await fleet.status(StatusQuery(fresh=False))
        if not _has(group, status):
            group.give(name)
            return False
        note(f"putting {awake} to sleep (draining for at most {format_seconds(drain_s)})")
        await fleet.control(request)
        return True


def _leaving(awake: str) -> FleetRef:
    try:
        return select(None, awake)
    except NotFoundError as error:  # its servers run, and its file is gone
        raise SkyctlError(error.message, hint=f"skyctl down --fleet {awake}") from error


def _has(group: SleepGroup, status: FleetStatus) -> bool:
    """Whether the fleet is in the group still, or cannot say."""
    now_in = status.sleep_group.name if status.sleep_group else None
    return now_in == group.name or not status.supervised


def asleep_for(ref: FleetRef) -> str:
    """What wakes the fleets that sleep while this one has the GPUs of its group; "" if none do."""
    group = ref.config.sleep_group
    with contextlib.suppress(SkyctlError):
        if group and SleepGroup(ref.paths.root, group).awake() == ref.name:
            others = (n for n in known_fleets() if n != ref.name and _lives_in(group, n))
            return "; ".join(f"{other} sleeps: skyctl switch {other}" for other in others)
    return ""


def _lives_in(group: str, name: str) -> bool:
    paths = fleet_paths(name)
    if not paths.database.exists():
        return False
    with FleetState(paths.database) as state:
        return state.get("sleep_group") == group and any(r.alive() for r in state.processes())


async def _started(fleet: FleetService, timeout_s: float | None) -> FleetStatus:
    """The status once no server starts any more: one that died in its sleep does now."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        status = await fleet.status()
        starting = [r.name for r in status.replicas if r.state.busy or _has_no_process(r)]
        if not starting:
            return status
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{', '.join(starting)} still start after {timeout_s:g} s; they go on",
                hint=f"follow it: skyctl wait --fleet {status.name}",
            )
        await asyncio.sleep(_POLL_S)


def _has_no_process(replica: ReplicaStatus) -> bool:
    return replica.state is ReplicaState.ASLEEP and replica.pid is None


def _refuse_asleep(status: FleetStatus, outcomes: Outcomes) -> None:
    """Raise SkyctlError if a server does not take part."""
    failed = {o.server: o.detail for o in outcomes if o.status is not OutcomeStatus.OK}
    problems = [
        f"{replica.name} is {replica.state}: {replica.reason or failed.get(replica.name, '')}"
        for replica in status.replicas
        if not replica.state.as_intended or replica.state is ReplicaState.ASLEEP
    ]
    if problems:
        raise SkyctlError(
            f"fleet {status.name} has the GPUs, but {'; '.join(problems)}",
            hint=f"look: skyctl status --fleet {status.name}",
        )
