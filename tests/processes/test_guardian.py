"""The guardian's process: it acts when its pusher dies, and never when it was released."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from skyctl.core import guard_process
from skyctl.core.guardian import guarded
from skyctl.store.paths import FleetPaths

# A pusher that starts a guardian whose command writes a file, says so, and waits for its end.
_PUSHER = """
import os, subprocess, sys
command = [sys.executable, "-S", "-c", "import os, sys; open(sys.argv[1], 'w').write("
           "os.environ.get('SKYCTL_KILL_AT', 'unset'))", sys.argv[2]]
argv = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), sys.argv[3], *command]
guardian = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
print(guardian.pid, flush=True)
if sys.stdin.readline() == "release\\n":
    guardian.stdin.write(b".")
    guardian.stdin.close()
    guardian.wait()
"""


def pusher(mark: Path, stopped_s: float = 0.0) -> tuple[subprocess.Popen[str], psutil.Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PUSHER, guard_process.__file__, str(mark), str(stopped_s)],
        env={**os.environ, "SKYCTL_KILL_AT": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_when_the_pusher_is_killed_the_command_runs_without_its_kill_point(tmp_path: Path) -> None:
    process, guardian = pusher(tmp_path / "mark")
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs([guardian], timeout=20)
    assert (tmp_path / "mark").read_text() == "unset"
    end(process)


def test_a_pusher_that_is_stopped_is_killed(tmp_path: Path) -> None:
    process, guardian = pusher(tmp_path / "mark", stopped_s=1.0)
    os.kill(process.pid, signal.SIGSTOP)
    psutil.wait_procs([guardian], timeout=20)
    assert process.wait(timeout=20) == -signal.SIGKILL
    assert (tmp_path / "mark").exists()
    end(process)


def test_a_pusher_that_goes_on_in_time_is_not_killed(tmp_path: Path) -> None:
    process, guardian = pusher(tmp_path / "mark", stopped_s=3.0)
    for _ in range(4):
        os.kill(process.pid, signal.SIGSTOP)
        psutil.wait_procs([guardian], timeout=1.1)
        os.kill(process.pid, signal.SIGCONT)
        psutil.wait_procs([guardian], timeout=0.6)  # one look
    process.communicate("release\n", timeout=20)
    assert process.returncode == 0 and not (tmp_path / "mark").exists()


def test_a_program_that_uses_skyctl_is_never_killed_for_being_stopped(tmp_path: Path) -> None:
    process, guardian = pusher(tmp_path / "mark", stopped_s=0.0)
    os.kill(process.pid, signal.SIGSTOP)
    gone, _ = psutil.wait_procs([guardian], timeout=2)
    assert not gone and process.poll() is None
    os.kill(process.pid, signal.SIGCONT)
    process.communicate("release\n", timeout=20)
    assert process.returncode == 0 and not (tmp_path / "mark").exists()


def test_when_it_is_released_nothing_runs(tmp_path: Path) -> None:
    process, guardian = pusher(tmp_path / "mark")
    process.communicate("release\n", timeout=20)
    psutil.wait_procs([guardian], timeout=20)
    assert not guardian.is_running() and not (tmp_path / "mark").exists()


async def test_it_lives_as_long_as_the_block_and_costs_next_to_nothing(tmp_path: Path) -> None:
    paths = FleetPaths(tmp_path, "stubs").prepare()
    before = {child.pid for child in psutil.Process().children()}
    async with guarded(paths):
        [child] = [c for c in psutil.Process().children() if c.pid not in before]
        assert "recover" in child.cmdline() and "--yes" in child.cmdline()
        assert child.memory_info().rss < 30 * 1024 * 1024
    assert not psutil.pid_exists(child.pid)


async def test_a_guardian_that_cannot_be_started_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    paths = FleetPaths(tmp_path, "stubs").prepare()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    async with guarded(paths):
        pass
