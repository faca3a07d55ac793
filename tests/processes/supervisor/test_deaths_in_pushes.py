"""Replicas that die in a push, which is played, and are back before it has ended or after."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from skyctl.errors import PushError
from skyctl.push.request import PushRequest, ServerPush
from skyctl.store.in_doubt import InDoubt, put_in_doubt
from tests.processes.supervisor.played import FakePush, push_ended
from tests.processes.supervisor.supervising import bring_up, pid_of, states, supervising
from tests.unit.supervisor.fleets import eventually, fleet_plan, stub_server


@pytest.mark.parametrize("reached", [False, True])
async def test_a_replica_that_dies_in_a_push_is_not_blamed_for_what_its_process_was_left_in(
    tmp_path: Path, push: FakePush, reached: bool
) -> None:
    """Unless the push may have reached the next process as well, which is ended then."""
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")]))
        push.gate.clear()
        left = [ServerPush("b", False, "quarantined", None, detail="connection lost")]
        push.error = PushError("b died", details={"servers": [s.to_json() for s in left]})
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v1"))
        await eventually(lambda: len(push.calls) == 1)
        pid = pid_of(supervisor, "b")
        os.kill(pid, signal.SIGKILL)
        replica = supervisor.replicas["b"]
        await eventually(lambda: replica.process is not None and replica.process.pid != pid)
        pid = pid_of(supervisor, "b")
        if reached:
            put_in_doubt(supervisor.state, {"b": InDoubt("b", "push-1", "update", True, True)})
        push.gate.set()
        await eventually(lambda: states(supervisor) == {"a": "ready", "b": "ready"})
        assert (pid_of(supervisor, "b") != pid) is reached
        assert replica.row.quarantine is None and replica.row.weight_version is None


async def test_a_replica_that_is_back_before_the_push_it_died_in_has_ended_stays_closed_to_users(
    tmp_path: Path, push: FakePush, checkpoint: object
) -> None:
    """The push says that its last process is quarantined; this one has the base weights."""
    async with supervising(tmp_path) as supervisor:
        await bring_up(supervisor, fleet_plan([stub_server("a"), stub_server("b")]))
        await push_ended(supervisor)
        push.gate.clear()
        await supervisor.start_push(PushRequest("/ckpt", weight_version="v2"))
        await eventually(lambda: len(push.calls) == 2)
        replica, pid = supervisor.replicas["b"], pid_of(supervisor, "b")
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: replica.process is not None and replica.process.pid != pid)
        push.observer.server("b", "quarantined", "connection lost")
        await eventually(lambda: replica.phase in ("admitting", "up"))
        await asyncio.sleep(0.1)
        left = [
            ServerPush("a", True, "ready", "v1"),
            ServerPush("b", False, "quarantined", None, detail="connection lost"),
        ]
        push.error = PushError("b died", details={"servers": [s.to_json() for s in left]})
        ends, push.gate = push.gate, asyncio.Event()
        ends.set()
        await eventually(lambda: supervisor.push_job is None)
        push.error = None
        await eventually(lambda: len(push.calls) == 3)
        assert push.calls[2] == ("/ckpt", ["b"]) and replica.phase == "admitting"
        assert supervisor.paths.hold_file("b").exists()
        push.gate.set()
        await eventually(lambda: states(supervisor) == {"a": "ready", "b": "ready"})
        assert replica.row.weight_version == "v1"
