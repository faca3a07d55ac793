"""The supervisor as a detached process: it survives, is replaced, adopts, and is torn down."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from skyctl.core.plan import FleetPlan
from skyctl.core.registry import FleetRef, left_alone, supervisor_running
from skyctl.core.requests import TakenDown
from skyctl.core.status import FleetStatus
from skyctl.errors import ConflictError, FleetDownError, HostUnreachable, SkyctlError
from skyctl.launch.local.host import scratch_environment
from skyctl.launch.local.process import ManagedProcess
from skyctl.service import bring_down
from skyctl.service.bring_down import take_down
from skyctl.service.bring_up import follow_operation
from skyctl.service.unsupervised import UnsupervisedFleet
from skyctl.store.journal import JobEvent
from skyctl.store.paths import FleetPaths, fleet_paths
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor import client as clients
from skyctl.supervisor import daemon
from skyctl.supervisor.interface import Reconcile, SupervisorClient
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.restarts import remember
from tests import forking
from tests.pids import gone
from tests.unit.supervisor.fleets import (
    command_server,
    eventually,
    fleet_plan,
    stub_router,
    stub_server,
)


@pytest.fixture
async def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetPaths]:
    """Paths of a fleet `stubs` of its own; whatever runs is taken down at the end."""
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    monkeypatch.setattr(daemon, "start_detached", forking.detached)
    paths = fleet_paths("stubs").prepare()
    yield paths
    await take_down(paths, drain_timeout_s=0.0)


async def up(paths: FleetPaths, plan: FleetPlan) -> FleetStatus:
    await daemon.ensure_running(paths)
    async with SupervisorClient.on_this_machine(paths) as client:
        begun = await client.reconcile(Reconcile(plan))
        if not begun.operation:
            return await client.status()
        return await follow_operation(client, begun.operation, lambda status: None, timeout_s=30)


async def status(paths: FleetPaths) -> FleetStatus:
    async with SupervisorClient.on_this_machine(paths) as client:
        return await client.status()


async def kill_supervisor(paths: FleetPaths) -> None:
    pid = (await status(paths)).supervisor_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not supervisor_running(paths))


async def test_servers_outlive_a_killed_supervisor_and_the_next_adopts_them(
    paths: FleetPaths,
) -> None:
    plan = fleet_plan([stub_server("a"), stub_server("b")], stub_router())
    before = await up(paths, plan)
    await kill_supervisor(paths)
    with FleetState(paths.database) as state:
        remember(state, "b", "was killed by SIGKILL")
    ref = FleetRef("stubs", paths, plan.config, paths.root, None)
    with FleetState(paths.database) as state:
        left = await UnsupervisedFleet(ref, state).status()
    assert left.health == "degraded" and left.supervised is False
    assert [r.restarts for r in left.replicas] == [0, 1]
    assert {r.state for r in left.replicas} == {"unsupervised"}
    assert "skyctl recover" in left.reasons[0].hint

    after = await up(paths, plan)
    assert [(r.restarts, r.restart_reason) for r in after.replicas] == [
        (0, ""),
        (1, "was killed by SIGKILL"),
    ]
    assert after.supervisor_pid != before.supervisor_pid
    assert [r.pid for r in after.replicas] == [r.pid for r in before.replicas]
    assert after.router is not None and before.router is not None
    assert after.router.pid == before.router.pid
    assert after.health == "healthy"


async def test_a_server_that_died_without_a_supervisor_is_replaced_and_its_orphans_stopped(
    paths: FleetPaths,
) -> None:
    plan = fleet_plan([stub_server("a"), stub_server("b")])
    before = await up(paths, plan)
    await kill_supervisor(paths)
    first = before.replicas[0].pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: gone(first))
    after = await up(paths, plan)
    assert after.replicas[0].pid != first and after.replicas[0].state == "ready"
    assert after.replicas[1].pid == before.replicas[1].pid


async def test_a_server_left_in_the_middle_of_a_push_that_cannot_be_repeated_is_restarted(
    paths: FleetPaths,
) -> None:
    plan = fleet_plan([stub_server("a"), stub_server("b")])
    before = await up(paths, plan)
    await kill_supervisor(paths)
    with FleetState(paths.database) as state:
        job = state.journal.begin("push", {"checkpoint": "c"})
        for stage in ("pause", "update"):
            state.journal.add_events(job.id, JobEvent.stage(stage))
        state.journal.add_events(job.id, JobEvent.server("a", "updating"))
        # the job's process is the dead supervisor, not this test
        state.write("UPDATE jobs SET owner = ?", '{"pid": 1, "create_time": 1.0, "boot_id": "x"}')
    after = await up(paths, plan)
    assert after.replicas[0].pid != before.replicas[0].pid
    assert after.replicas[1].pid == before.replicas[1].pid
    with FleetState(paths.database) as state:
        assert state.journal.job(job.id).state == "interrupted"


async def test_down_works_without_a_supervisor_and_may_be_repeated(paths: FleetPaths) -> None:
    before = await up(paths, fleet_plan([stub_server("a"), stub_server("b")], stub_router()))
    await kill_supervisor(paths)
    done = await take_down(paths, drain_timeout_s=0.0)
    assert set(done.stopped) == {"a", "b", "router"} and not done.supervised
    for replica in before.replicas:
        assert replica.pid is not None
        assert gone(replica.pid)
    assert not paths.socket.exists()
    assert (await take_down(paths, drain_timeout_s=0.0)).stopped == ()


async def test_a_fleet_that_is_started_again_amid_a_down_is_down_after_it(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = fleet_plan([stub_server("a")])
    await up(paths, plan)
    await kill_supervisor(paths)
    wait_gone = daemon.wait_gone

    async def started_meanwhile(paths: FleetPaths) -> None:
        await wait_gone(paths)
        if daemon.wait_gone is not wait_gone:
            monkeypatch.setattr(daemon, "wait_gone", wait_gone)
            await up(paths, plan)

    monkeypatch.setattr(daemon, "wait_gone", started_meanwhile)
    done = await take_down(paths, drain_timeout_s=0.0)
    assert done == TakenDown(("a",), supervised=True)
    assert not supervisor_running(paths)
    with FleetState(paths.database) as state:
        assert state.processes() == []


def test_a_supervisor_ends_although_a_thread_of_it_hangs(tmp_path: Path) -> None:
    """In a read of a file system that is gone: `down` would wait for the process in vain."""
    code = """
import asyncio, sys, time
from skyctl.supervisor import __main__, daemon

async def serve(paths):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)

daemon.serve = serve
sys.exit(__main__.main())
"""
    environ = {**os.environ, "SKYCTL_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, "--fleet", "stubs"]
    assert subprocess.run(command, env=environ, timeout=30, check=False).returncode == 0


async def test_a_supervisor_in_another_container_is_not_killed_from_here(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says 0 for its pid, which as a target of kill is the caller's process group."""
    connection = MagicMock(socket.socket)
    connection.__enter__.return_value.getsockopt.return_value = struct.pack("3i", 0, 0, 0)
    monkeypatch.setattr(clients.socket, "socket", lambda *asked: connection)
    with pytest.raises(SkyctlError, match="runs in another container"):
        clients.listening(paths)


async def test_down_never_signals_a_process_that_only_has_the_recorded_pid(
    paths: FleetPaths,
) -> None:
    bystander = ManagedProcess.spawn(
        ["sleep", "600"], {}, paths.root / "bystander.log", token="not recorded"
    )
    assert bystander.identity is not None
    stale = bystander.identity.__class__(
        bystander.identity.pid, bystander.identity.create_time - 100, bystander.identity.boot_id
    )
    with FleetState(paths.database) as state:
        state.save_process(
            ProcessRow("a", "server", "running", "token", stale, "h", "127.0.0.1", 1)
        )
    assert (await take_down(paths, drain_timeout_s=0.0)).stopped == ()
    assert bystander.alive()
    await bystander.stop(5)


async def test_a_spawn_whose_identity_was_never_written_is_stopped_by_down(
    paths: FleetPaths,
) -> None:
    child = ManagedProcess.spawn(["sleep", "600"], {}, paths.log("a"), token="intended")
    with FleetState(paths.database) as state:
        state.save_process(
            ProcessRow("a", "server", "intended", "intended", None, "h", "127.0.0.1", 1)
        )
    assert left_alone(paths)
    assert (await take_down(paths, drain_timeout_s=0.0)).stopped == ("a",)
    assert not child.alive()


async def test_term_brings_the_whole_fleet_down(paths: FleetPaths) -> None:
    running = await up(paths, fleet_plan([stub_server("a")]))
    assert running.supervisor_pid is not None
    os.kill(running.supervisor_pid, signal.SIGTERM)
    await eventually(lambda: not supervisor_running(paths))
    assert running.replicas[0].pid is not None
    assert not psutil.pid_exists(running.replicas[0].pid)
    assert not paths.socket.exists()


async def test_of_two_supervisors_started_at_once_one_remains(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []
    spawn = daemon._spawn
    monkeypatch.setattr(
        daemon, "_spawn", lambda paths: children.append(spawn(paths)) or children[-1]
    )
    started = await asyncio.gather(daemon.ensure_running(paths), daemon.ensure_running(paths))
    assert True in started
    first = await status(paths)
    for child in children:
        if child.pid != first.supervisor_pid:
            assert await asyncio.to_thread(child.wait, 60)
    assert not await daemon.ensure_running(paths)
    assert (await status(paths)).supervisor_pid == first.supervisor_pid
    with pytest.raises(ConflictError, match="has a supervisor already"):
        await daemon.serve(paths)


async def test_who_asks_whether_a_supervisor_runs_does_not_keep_one_from_starting(
    paths: FleetPaths,
) -> None:
    asking = os.open(paths.supervisor_lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(asking, fcntl.LOCK_SH)  # as supervisor_running() does, for longer
    assert not supervisor_running(paths)
    locking = asyncio.create_task(daemon._lock(paths))
    done, _ = await asyncio.wait({locking}, timeout=0.1)
    assert not done
    os.close(asking)
    locked = await locking
    assert supervisor_running(paths)
    locked.close()


async def test_an_operation_that_ended_is_told_of_when_another_has_begun(
    paths: FleetPaths,
) -> None:
    before = await up(paths, fleet_plan([stub_server("a")]))
    assert before.operation is not None
    async with SupervisorClient.on_this_machine(paths) as client:
        await client.restart()
        ended = await follow_operation(
            client, before.operation.id, lambda status: None, timeout_s=5
        )
    assert ended.operation == before.operation


async def test_the_socket_and_the_logs_are_private(paths: FleetPaths) -> None:
    await daemon.ensure_running(paths)
    for path in (paths.socket, paths.supervisor_log, paths.supervisor_lock):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(paths.directory.stat().st_mode) == 0o700


async def test_errors_cross_the_socket_with_their_kind_and_hint(paths: FleetPaths) -> None:
    async with SupervisorClient.on_this_machine(paths) as client:
        with pytest.raises(FleetDownError, match="stubs is not running") as caught:
            await client.status()
        assert "skyctl up" in caught.value.hint
        await daemon.ensure_running(paths)
        with pytest.raises(FleetDownError) as caught:
            await client.restart()
        assert "skyctl up" in caught.value.hint


async def test_a_supervisor_that_nobody_tells_what_to_run_is_no_answer_and_ends(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever started it died before it said so: another has to take the servers over."""
    state = FleetState(paths.database)
    supervisor = Supervisor(paths, state)
    with pytest.raises(FleetDownError):
        await supervisor.findings()
    monkeypatch.setattr(daemon, "_UNPLANNED_S", 0.0)
    await daemon._end_without_plan(supervisor)
    assert supervisor.finished.is_set()
    with pytest.raises(FleetDownError, match="is ending"):
        supervisor.change_to(fleet_plan([stub_server("a")]))
    state.close()


async def test_a_secret_of_a_server_is_nowhere_on_disk(paths: FleetPaths) -> None:
    await up(paths, fleet_plan([stub_server("a", VLLM_API_KEY="open-sesame-42")]))
    for path in paths.directory.rglob("*"):
        if path.is_file():
            assert b"open-sesame-42" not in path.read_bytes(), path


def test_what_a_server_compiles_is_kept_where_nobody_else_can_put_it(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    kept = Path(scratch_environment(paths)["TORCHINDUCTOR_CACHE_DIR"])
    assert kept.is_relative_to(paths.root)
    assert kept.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    assert "TORCHINDUCTOR_CACHE_DIR" not in scratch_environment(paths)
    paths.scratch.rmdir()


async def test_what_a_killed_server_leaves_in_its_temporary_directory_leaves_with_the_fleet(
    paths: FleetPaths,
) -> None:
    script = "import os, tempfile, time; tempfile.mkstemp('left'); os.kill(os.getpid(), 9)"
    await daemon.ensure_running(paths)
    plan = fleet_plan([command_server("a", script)])
    async with SupervisorClient.on_this_machine(paths) as client:
        await client.reconcile(Reconcile(plan))
    await eventually(lambda: bool(list(paths.scratch.glob("*left"))))
    assert paths.scratch.stat().st_mode & 0o077 == 0
    await take_down(paths, drain_timeout_s=0.0)
    assert not paths.scratch.exists()


def test_a_supervisor_has_loaded_all_it_needs_before_it_owns_anything() -> None:
    """An upgrade replaces the files below a process that lives for months."""
    look = (
        "import sys; from skyctl.supervisor import daemon; daemon.load_everything();"
        "before = set(sys.modules);"
        "import skyctl.push.transaction, skyctl.core.keeping,"
        " skyctl.supervisor.api, skyctl.transfer.transports.shm, skyctl.checkpoints.live;"
        "print(sorted(set(sys.modules) - before), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]


async def test_down_ends_a_process_of_the_fleet_that_its_supervisor_could_not_put_on_record(
    paths: FleetPaths,
) -> None:
    """Spawned while the state's disk failed; then the supervisor, which alone knew it, died."""
    FleetState(paths.database).close()
    forgotten = ManagedProcess.spawn(["sleep", "600"], {}, paths.log("a"), token="not recorded")
    assert not left_alone(paths)  # it has no fleet: nothing is on record
    with FleetState(paths.database) as state:
        state.save_process(ProcessRow("a", "server", "stale", "earlier", None, "h", "127.0.0.1", 1))
    assert left_alone(paths)
    assert (await take_down(paths, drain_timeout_s=0.0)).stopped == ("a",)
    assert not forgotten.alive()


async def test_down_without_a_supervisor_ends_the_rest_when_one_cannot_be_ended(
    paths: FleetPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And forgets neither of them, so that the next one goes on."""

    async def stop(row: ProcessRow, host: object, timeout_s: float) -> bool:
        if row.name == "a":
            raise HostUnreachable("me@far cannot be asked")
        await asyncio.sleep(0.05)
        ended.append(row.name)
        return True

    ended: list[str] = []
    with FleetState(paths.database) as state:
        for name in ("a", "b"):
            state.save_process(ProcessRow(name, "server", "running", name, None, "h", "", 1))
    with monkeypatch.context() as patched:
        patched.setattr(bring_down, "stop_recorded", stop)
        with pytest.raises(SkyctlError, match="me@far cannot be asked"):
            await take_down(paths, drain_timeout_s=0.0)
    assert ended == ["b"]
    with FleetState(paths.database) as state:
        assert state.get("going_down") and len(state.processes()) == 2
