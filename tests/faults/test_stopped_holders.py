"""A process that is stopped, not dead, while it acts on a fleet: by the real commands."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyctl.core import recorded
from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.following import job_changes
from skyctl.core.registry import FleetRef
from skyctl.errors import ConflictError, FleetDownError
from skyctl.service import supervised
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor import client as clients
from tests.faults.shell_commands import BOUND_S, attached, stop, wait_until_stopped
from tests.faults.stub_fleet import StubFleet
from tests.pids import gone


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


# A command that takes a lock of a fleet and keeps it; "full": there is no room for its file.
_HOLDER = """
import sys
from pathlib import Path
from skyctl.errors import StateUnwritable
from skyctl.startup import become_command
from skyctl.store import locks
def full(path, flags=0):
    raise StateUnwritable("No space left on device")
become_command()
directory, name, subject, disk = sys.argv[1:]
if disk == "full":
    locks.create_private_file = full
lock = locks.Locks(Path(directory)).take(name, subject)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def stopped_holder(
    directory: Path, name: str, subject: str, disk: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """A stopped process that holds this lock."""
    with stopped_process(_HOLDER, str(directory), name, subject, disk) as process:
        yield process


@contextmanager
def stopped_process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is stopped once it has written a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        stop(process)
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_push_that_is_stopped_is_named_and_then_ended_by_its_guardian(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path) as fleet:
        fleet.hang("/start_weight_update")
        with fleet.started("sync-weights", "v1") as push:
            await fleet.stubs[1].asgi.until("/start_weight_update")
            stop(push)
            code, envelope = await fleet.skyctl("pause")
            assert code != 0 and "stopped" in envelope["error"]["message"]
            assert f"kill -CONT {push.pid}" in envelope["error"]["hint"]
            _, envelope = await fleet.skyctl("status")
            (reason,) = [r for r in envelope["data"]["reasons"] if "stopped" in r["message"]]
            assert f"kill -KILL {push.pid}" in reason["hint"]
            fleet.mend()
            await until(lambda: push.poll() is not None)
            await until(lambda: fleet.frozen == [False, False])
            assert push.returncode == -signal.SIGKILL
            code, _ = await fleet.skyctl("recover", "--yes")  # waits for the guardian's
            assert code == 0


async def test_recover_ends_a_verb_that_is_stopped(tmp_path: Path) -> None:
    async with attached(tmp_path) as fleet:
        fleet.hang("/pause")
        with fleet.started("pause") as verb:
            await fleet.stubs[1].asgi.until("/pause")
            stop(verb)
            fleet.mend()
            code, envelope = await fleet.skyctl("recover", "--dry-run")
            (finding,) = [f for f in envelope["data"]["findings"] if f["found"] == "stopped"]
            assert code == 0 and finding["action"] == "end" and str(verb.pid) in finding["detail"]
            code, _ = await fleet.skyctl("recover", "--yes")
            assert code == 0 and verb.wait(timeout=BOUND_S) == -signal.SIGKILL
            code, _ = await fleet.skyctl("resume")
            assert code == 0 and fleet.frozen == [False, False]


async def test_ctrl_z_is_refused_while_a_command_acts_and_stops_one_that_does_not(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path) as fleet:
        fleet.hang("/start_weight_update")
        with fleet.started("sync-weights", "v1") as push:
            await fleet.stubs[1].asgi.until("/start_weight_update")
            push.send_signal(signal.SIGTSTP)
            assert push.stderr is not None
            lines = iter(push.stderr.readline, "")
            refused = await asyncio.to_thread(lambda: any("not suspended" in x for x in lines))
            assert refused and psutil.Process(push.pid).status() != psutil.STATUS_STOPPED
            fleet.mend()
        await until(lambda: fleet.frozen == [False, False])  # it was killed: its guardian acts
        with fleet.started("status", "--watch") as watch:
            assert watch.stdout is not None
            await asyncio.to_thread(watch.stdout.readline)
            watch.send_signal(signal.SIGTSTP)
            await until(lambda: psutil.Process(watch.pid).status() == psutil.STATUS_STOPPED)


def test_a_supervisor_that_is_stopped_is_named_and_replaced(tmp_path: Path) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write()
    fleet.run("up")
    try:
        before = {name: row["pid"] for name, row in fleet.replicas().items()}
        pid = clients.listening(FleetPaths(tmp_path / "home", "stubs"))
        os.kill(pid, signal.SIGSTOP)
        reasons = fleet.json("status")["data"]["reasons"]
        assert any(f"(pid {pid}) is stopped" in reason["message"] for reason in reasons)
        envelope = fleet.json("pause", expect=4)
        assert f"kill -CONT {pid}" in envelope["error"]["hint"]
        fleet.run("recover", "--yes")
        assert gone(pid)
        assert {name: row["pid"] for name, row in fleet.replicas().items()} == before
        pid = clients.listening(FleetPaths(tmp_path / "home", "stubs"))
        os.kill(pid, signal.SIGSTOP)
    finally:
        fleet.run("down")
    assert all(gone(process) for process in (pid, *before.values()))


def stopped_findings(fleet: StubFleet) -> list[dict[str, Any]]:
    findings = fleet.json("recover", "--dry-run")["data"]["findings"]
    return [finding for finding in findings if finding["found"] == "stopped"]


def test_recover_ends_a_stopped_supervisor_whose_servers_have_died(tmp_path: Path) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write()
    fleet.run("up")
    try:
        pid = clients.listening(FleetPaths(tmp_path / "home", "stubs"))
        os.kill(pid, signal.SIGSTOP)
        for row in fleet.replicas().values():
            os.kill(row["pid"], signal.SIGKILL)
        (finding,) = stopped_findings(fleet)
        assert finding["action"] == "end" and str(pid) in finding["detail"]
        fleet.run("recover", "--yes")
        assert gone(pid) and stopped_findings(fleet) == []
        fleet.run("up")
    finally:
        fleet.run("down")


def test_recover_ends_a_stopped_command_that_keeps_others_from_starting_the_fleet(
    tmp_path: Path,
) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write()
    fleet.run("up")
    try:
        directory = FleetPaths(tmp_path / "home", "stubs").directory
        with stopped_holder(directory, "up", "taking over the fleet") as process:
            (finding,) = stopped_findings(fleet)
            assert finding["action"] == "end" and str(process.pid) in finding["detail"]
            fleet.run("recover", "--yes")
            assert process.wait(timeout=BOUND_S) == -signal.SIGKILL
    finally:
        fleet.run("down")


def test_a_stopped_command_that_had_no_room_for_its_lock_is_named(tmp_path: Path) -> None:
    with (
        FleetState(tmp_path / "state.sqlite") as state,
        stopped_holder(tmp_path, "turn", "skyctl pause", disk="full") as process,
    ):
        arbiter = Arbiter(state.locks)
        assert [holder.pid for holder in arbiter.stopped()] == [process.pid]
        with pytest.raises(ConflictError, match=rf"pid {process.pid}\b.*stopped") as refused:
            arbiter.take(Act.PUSH, "push-1")
        assert f"kill -CONT {process.pid}" in refused.value.hint


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_follower_does_not_wait_until_a_stopped_process_releases_a_job_that_ended(
    goes_on: bool, tmp_path: Path
) -> None:
    with FleetState(tmp_path / "state.sqlite") as state:
        job = state.journal.begin("push", {})
        state.journal.end(job.id, "failed")
        with stopped_holder(tmp_path, "turn", job.id) as process:
            if goes_on:
                process.send_signal(signal.SIGCONT)
                wait_until_stopped(process.pid, False)
            released = (await job_changes(state, job.id)).released
    assert released is not goes_on


# What keeps a fleet's lock, and its socket, and does nothing.
_LISTENER = """
import socket, sys
from pathlib import Path
from skyctl.store.paths import FleetPaths
paths = FleetPaths(Path(sys.argv[1]), "stubs")
paths.prepare()
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(paths.socket))
listener.listen()
print(flush=True)
sys.stdin.read()
"""


async def test_a_follower_does_not_wait_for_a_supervisor_that_nobody_will_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its push is over, and was not put on record; or it had no guardian."""
    monkeypatch.setattr(supervised, "_STOPPED_S", 0.1)
    monkeypatch.setattr(recorded, "CHANGES_WAIT_S", 0.1)
    ref = FleetRef("stubs", FleetPaths(tmp_path, "stubs"), None, tmp_path)
    with (
        stopped_process(_LISTENER, str(tmp_path)) as process,
        FleetState(ref.paths.database) as state,
    ):
        job = state.journal.begin("push", {})
        fleet = supervised.SupervisedFleet(ref)
        with pytest.raises(FleetDownError, match=rf"pid {process.pid}\b.* is stopped") as refused:
            await asyncio.wait_for(fleet.wait_job(job.id), BOUND_S)
        assert "skyctl recover" in refused.value.hint
        assert (await fleet.job(job.id)).state == "running"  # what is on record can be seen
