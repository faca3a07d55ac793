"""A supervisor for servers that run on without one: the next command that needs it starts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import AbstractAsyncContextManager, suppress

from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.plan import FleetPlan
from skyctl.core.planning import living, planned, scaled, servers_of
from skyctl.core.registry import FleetRef, base_dir_of, left_alone
from skyctl.core.requests import StatusQuery
from skyctl.errors import SkyctlError, VersionMismatch
from skyctl.fleetfile.load import load_fleet
from skyctl.store.locks import Holder, Lock, Locks
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.store.stopped import end_stopped
from skyctl.supervisor.client import listening, stopped_supervisor
from skyctl.supervisor.interface import Adopt, SupervisorClient

UP_LOCK = "up"
UP_LOCK_WAIT_S = 30.0
ADOPT_WAIT_S = 5.0
_STOPPED_S = 1.0


def up_lock(locks: Locks, activity: str) -> AbstractAsyncContextManager[Lock]:
    """The lock of commands that start a fleet's supervisor, or take over without it. Raises
    ConflictError if it is not free after `UP_LOCK_WAIT_S`.
    """
    return locks.hold(UP_LOCK, activity, wait_s=UP_LOCK_WAIT_S)


async def revive(ref: FleetRef) -> None:
    """Start a supervisor that adopts what runs without one, if anything does, and wait a few
    seconds for the adoption to finish. It repairs what an interrupted push left.

    Raises:
        SkyctlError: the fleet can no longer be planned here, or the supervisor did not start.
    """
    if not left_alone(ref.paths):
        return
    from skyctl.supervisor import daemon

    async with up_lock(Locks(ref.paths.directory), "taking over the fleet"):
        if not left_alone(ref.paths):  # another command was faster
            return
        plan = as_it_ran(ref)
        await daemon.ensure_running(ref.paths)
        async with SupervisorClient.on_this_machine(ref.paths) as client:
            await _until_ended(client, await client.adopt(Adopt(plan)))


def as_it_ran(ref: FleetRef) -> FleetPlan:
    """The plan of what runs: that of the fleet file as it was at the last `up`, with the number of
    replicas that ran.

    Raises:
        SkyctlError: that file cannot be planned here.
    """
    with FleetState(ref.paths.database) as state:
        ports: dict[str, int] = json.loads(state.get("ports") or "{}")
        ports_in_use = living(ports, state.processes())
        pins: dict[str, str] = json.loads(state.get("pins") or "{}")
    servers, config, base_dir = servers_of(ports), ref.config, base_dir_of(ref)
    if ref.paths.fleet_file.exists():  # the user's may have changed, and is not applied then
        config = load_fleet(ref.paths.fleet_file, base_dir=base_dir).config
    if isinstance(config.replicas, int) and servers and config.replicas != len(servers):
        config = scaled(config, len(servers))
    ran = {"router": "router" in ports, "tinker": "tinker" in ports}
    return planned(config, base_dir, ports_in_use, pins=pins, **ran)


async def replace_other(ref: FleetRef) -> None:
    """End a supervisor of another skyctl version; its servers run on without one.

    Raises:
        ConflictError: a push is in progress in it.
        SkyctlError: it runs in another container.
    """
    async with SupervisorClient.on_this_machine(ref.paths) as client:
        try:
            await client.urls()
            return
        except VersionMismatch:
            pid = listening(ref.paths)
        except SkyctlError:
            return  # the next request reports it
    from skyctl.supervisor import daemon

    # held until it is gone: no push begins in it
    with Arbiter(Locks(ref.paths.directory)).take(Act.RECOVER, "replacing the supervisor"):
        # KILL: on TERM it would take the fleet down
        os.kill(pid, signal.SIGKILL)
        await daemon.wait_gone(ref.paths)


def stopped_holders(paths: FleetPaths) -> list[Holder]:
    """Commands that are stopped while they keep others from starting, or taking over, the fleet."""
    return [holder for holder in Locks(paths.directory).holders(UP_LOCK) if holder.stopped]


async def end_stopped_processes(paths: FleetPaths) -> None:
    """Kill the supervisor, and commands that keep others from starting one, if they are stopped,
    and not just for a moment; the servers run on.

    Raises:
        SkyctlError: the supervisor does not end.
    """
    pid, holders = stopped_supervisor(paths), await asyncio.to_thread(stopped_holders, paths)
    if not pid and not holders:
        return
    await asyncio.sleep(_STOPPED_S)
    from skyctl.supervisor import daemon

    for holder in holders:
        holder.end_stopped()
    if pid and end_stopped(pid, lambda: stopped_supervisor(paths) == pid):
        await daemon.wait_gone(paths)


async def _until_ended(client: SupervisorClient, operation: int) -> None:
    deadline = time.monotonic() + ADOPT_WAIT_S
    with suppress(SkyctlError):  # the caller checks by itself
        while time.monotonic() < deadline:
            current = (await client.status(StatusQuery(fresh=False))).operation
            if current is None or current.id != operation or current.ended_at is not None:
                return
            await asyncio.sleep(0.05)
