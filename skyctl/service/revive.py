"""A supervisor for servers that run on without one: started by the next command that needs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import replace

from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.plan import FleetPlan
from skyctl.core.registry import FleetRef
from skyctl.errors import SkyctlError, VersionMismatch
from skyctl.service.left_alone import left_alone
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.client import SupervisorClient

UP_LOCK = "up"
UP_LOCK_WAIT_S = 30.0
ADOPT_WAIT_S = 5.0


async def revive(ref: FleetRef, *, wait_s: float = ADOPT_WAIT_S) -> bool:
    """Start a supervisor that adopts what runs, and wait `wait_s` seconds for it to be done.

    It puts right what an interrupted push left. False: nothing was left alone.

    Raises:
        SkyctlError: the fleet cannot be planned here any more, or the supervisor did not start.
    """
    if not left_alone(ref.paths):
        return False
    from skyctl.supervisor import daemon
    from skyctl.supervisor.wire import plan_to_json

    with (
        FleetState(ref.paths.database) as state,
        state.locks.hold(UP_LOCK, "taking over the fleet", wait_s=UP_LOCK_WAIT_S),
    ):
        if not left_alone(ref.paths):  # somebody else was faster
            return False
        plan = as_it_ran(ref, state)
        await daemon.ensure_running(ref.paths)
        client = SupervisorClient(ref.paths)
        try:
            answer = await client.post("/adopt", {"plan": plan_to_json(plan)})
            await _until_ended(client, int(answer["operation"]), wait_s)
        finally:
            await client.close()
    return True


def as_it_ran(ref: FleetRef, state: FleetState) -> FleetPlan:
    """The plan of what runs: the fleet file's, with as many replicas as there were.

    Raises:
        SkyctlError: the fleet file cannot be planned here.
    """
    from skyctl.service.planning import planned, scaled

    names = set(json.loads(state.get("ports") or "{}"))
    servers = names - {"router", "router-metrics"}
    same = not isinstance(ref.config.replicas, int) or ref.config.replicas == len(servers)
    plan = planned(ref) if same or not servers else scaled(ref, len(servers))
    return plan if "router" in names else replace(plan, router=None)


async def replace_other(ref: FleetRef) -> None:
    """End a supervisor of another version of skyctl; its servers go on, without one.

    Raises:
        ConflictError: a push is in progress in it.
    """
    client = SupervisorClient(ref.paths)
    try:
        await client.get("/recover", timeout_s=60.0)
        return
    except VersionMismatch:
        pid = listening(ref.paths)
    except SkyctlError:
        return  # whoever asks it next says so
    finally:
        await client.close()
    with FleetState(ref.paths.database) as state:
        Arbiter(state.locks).take(Act.RECOVER, "replacing the supervisor").release()
    from skyctl.supervisor import daemon

    # KILL: on TERM it would bring the fleet down
    os.kill(pid, signal.SIGKILL)
    await daemon.wait_gone(ref.paths)


def listening(paths: FleetPaths) -> int:
    """The process that listens at the fleet's socket, as the kernel says."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(str(paths.socket))
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", found)[0])


async def _until_ended(client: SupervisorClient, operation: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    with suppress(SkyctlError):  # whoever called looks for himself
        while time.monotonic() < deadline:
            current = (await client.get("/status?fresh=0"))["operation"]
            if current is None or current["id"] != operation or current["ended_at"] is not None:
                return
            await asyncio.sleep(0.05)
