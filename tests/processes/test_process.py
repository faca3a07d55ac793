"""Real process trees: spawned apart, stopped whole, and nobody else's ever signalled."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skyctl.errors import SkyctlError
from skyctl.launch.local.process import ManagedProcess, start_detached
from skyctl.store.identity import ProcessIdentity, identify
from skyctl.store.paths import FleetPaths, flocked
from tests.pids import gone
from tests.unit.launch.logs import first_line
from tests.unit.supervisor.fleets import eventually

# A leader with a child in its session, as vLLM's API server has its engine core.
TREE = """
import subprocess, sys, time
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session={apart})
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


async def spawn_tree(tmp_path: Path, *, apart: bool = False) -> tuple[ManagedProcess, int]:
    log = tmp_path / "tree.log"
    script = TREE.format(apart=apart)
    process = ManagedProcess.spawn([sys.executable, "-c", script], {}, log, secrets.token_hex(8))
    return process, int(await first_line(log))


async def test_a_child_has_its_own_session_and_a_private_log(tmp_path: Path) -> None:
    process, _ = await spawn_tree(tmp_path)
    assert process.pid is not None
    assert os.getsid(process.pid) == process.pid
    assert stat.S_IMODE((tmp_path / "tree.log").stat().st_mode) == 0o600
    await process.stop(5)


def test_a_supervisor_and_a_guardian_have_the_import_path_of_what_starts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be relative, and they run in another directory."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "only_there.py").write_text("print('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "modules")
    log = tmp_path / "child.log"
    argv = [sys.executable, "-m", "only_there"]
    start_detached(argv, FleetPaths(tmp_path / "home", "stubs"), log).wait(30)
    assert log.read_text() == "imported\n"


async def test_stopping_ends_the_whole_tree_gently(tmp_path: Path) -> None:
    process, child = await spawn_tree(tmp_path)
    assert await process.stop(10) is True
    assert process.pid is not None
    assert gone(process.pid) and gone(child)
    assert process.exited.is_set()


async def test_what_ignores_term_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = ManagedProcess.spawn([sys.executable, "-c", STUBBORN], {}, log, secrets.token_hex(8))
    await first_line(log)
    assert await process.stop(0.2) is False
    assert process.pid is not None and gone(process.pid)
    assert process.exit_text() == "was killed by SIGKILL"


SHARED_MEMORY = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=64).name, flush=True)
time.sleep(600)
"""


async def test_shared_memory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = ManagedProcess.spawn(
        [sys.executable, "-c", SHARED_MEMORY], {}, log, secrets.token_hex(8)
    )
    segment = Path("/dev/shm") / await first_line(log)
    assert segment.exists()
    await process.stop(0.2)
    assert not segment.exists()


@pytest.mark.parametrize("apart", [False, True])
async def test_the_orphans_of_a_killed_leader_are_found_and_stopped(
    tmp_path: Path, apart: bool
) -> None:
    process, child = await spawn_tree(tmp_path, apart=apart)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.wait_for(process.exited.wait(), 10)
    assert not gone(child)
    await process.stop(5)
    assert gone(child)


async def test_a_recorded_descendant_is_stopped_though_nothing_else_ties_it(
    tmp_path: Path,
) -> None:
    process, child = await spawn_tree(tmp_path, apart=True)
    assert process.record_descendants() is True
    assert process.record_descendants() is False
    assert [d.pid for d in process.descendants] == [child]
    assert process.identity is not None
    os.kill(process.identity.pid, signal.SIGKILL)
    later = ManagedProcess(process.identity, "no such token", descendants=process.descendants)
    await later.stop(5)
    assert gone(child)
    await process.stop(5)


async def test_a_spawn_that_was_never_recorded_is_found_by_its_token(tmp_path: Path) -> None:
    process, child = await spawn_tree(tmp_path)
    unrecorded = ManagedProcess(None, process.token)
    assert {p.pid for p in unrecorded.members()} == {process.pid, child}
    await unrecorded.stop(5)
    assert gone(child)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()


async def test_a_process_with_our_pid_but_another_identity_is_never_signalled(
    stranger: subprocess.Popen[bytes],
) -> None:
    real = identify(stranger.pid)
    assert real is not None
    for imposter in (
        ProcessIdentity(real.pid, real.create_time - 60, real.boot_id),
        ProcessIdentity(real.pid, real.create_time, "an earlier boot"),
    ):
        process = ManagedProcess(imposter, "token", descendants=[imposter])
        assert not process.alive() and process.exited.is_set()
        assert process.members() == []
        await process.stop(0.1)
    assert stranger.poll() is None


# Its first thread ends and becomes a zombie; another keeps what the process has.
FIRST_THREAD_ENDS = """
import ctypes, fcntl, sys, threading, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_a_process_has_ended_only_when_its_last_thread_has(tmp_path: Path) -> None:
    """Until then its port is taken, and its locks, and its memory on a GPU."""
    log, lock = tmp_path / "log", tmp_path / "lock"
    argv = [sys.executable, "-c", FIRST_THREAD_ENDS, str(lock)]
    process = ManagedProcess.spawn(argv, {}, log, secrets.token_hex(8))
    await first_line(log)
    assert process.pid is not None
    first = psutil.Process(process.pid)
    await eventually(lambda: first.status() == psutil.STATUS_ZOMBIE)
    assert process.alive() and not gone(process.pid)
    later = ManagedProcess(process.identity, "no such token")
    assert later.members() == [first] and not later.exited.is_set()
    await later.stop(0.2)
    assert not flocked(lock)
    await process.stop(1)


async def test_a_program_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SkyctlError, match="cannot start /no/such/python"):
        ManagedProcess.spawn(["/no/such/python"], {}, tmp_path / "log", "t")


async def test_a_log_that_cannot_be_opened_keeps_no_server_down(tmp_path: Path) -> None:
    log = Path("/dev/null/log")
    process = ManagedProcess.spawn([sys.executable, "-c", "print(1)"], {}, log, "t")
    await asyncio.wait_for(process.exited.wait(), 20)
    assert process.exit_text() == "exited with code 0"
    await process.stop(1)
