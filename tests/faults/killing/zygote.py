"""Commands and supervisors forked from a warm process: real processes, without 0.6 s of imports.

`python -m tests.faults.killing.zygote` reads one JSON line per command on stdin, {"argv", "env",
"cwd", "out"}, forks a child that runs it, and answers {"code", "seconds"} when it has ended. A
supervisor that such a command starts is forked in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from skyctl import kill_points
from tests import forked

_WARM = (
    "skyctl.cli.app",
    "skyctl.cli.fleet_view",
    "skyctl.cli.job_view",
    "skyctl.cli.asking",
    "skyctl.cli.recover",
    "skyctl.service.attached",
    "skyctl.service.attached_push",
    "skyctl.service.attached_recovery",
    "skyctl.service.bring_up",
    "skyctl.service.drift",
    "skyctl.service.revive",
    "skyctl.service.supervised",
    "skyctl.supervisor.daemon",
    "skyctl.push.transaction",
    "skyctl.transfer.transports.shm",
    "uvicorn.lifespan.off",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "httpx",
    "yaml",
)


_asks, _ask = os.pipe()  # from commands to the warm process: a supervisor is wanted
_children: set[int] = set()


class ForkedSupervisor:
    """What `daemon.ensure_running` wants to know of the process it started."""

    def poll(self) -> int | None:
        return None  # its deadline tells


def ask_for_supervisor(paths: Any) -> ForkedSupervisor:
    """Stands in for `daemon._spawn`: the same process, forked from the warm one."""
    environment = {k: v for k, v in os.environ.items() if k.startswith("SKYCTL_")}
    line = json.dumps({"root": str(paths.root), "name": paths.name, "env": environment})
    os.write(_ask, line.encode() + b"\n")
    return ForkedSupervisor()


def _fork_supervisor(asked: dict[str, Any], guardian: bool) -> None:
    from skyctl.store.paths import FleetPaths, create_private_file
    from skyctl.supervisor.daemon import serve

    pid = os.fork()
    if pid:
        _children.add(pid)
        return
    code = 1
    try:
        paths = FleetPaths(Path(asked["root"]), asked["name"]).prepare()
        os.setsid()
        log = create_private_file(paths.supervisor_log, os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _as_if_started(asked["env"] | {"SKYCTL_HOME": asked["root"]}, guardian)
        os.chdir("/")
        asyncio.run(serve(paths))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _as_if_started(env: dict[str, str], guardian: bool) -> None:
    """The environment of a process of its own, and where it is to die."""
    for name in [name for name in os.environ if name.startswith("SKYCTL_")]:
        del os.environ[name]
    os.environ.update(env)
    asked = os.environ.get(kill_points.VARIABLE, "")
    point, left, delay_s = kill_points._parsed(asked)
    kill_points._point, kill_points._left, kill_points._delay_s = point, left, delay_s
    kill_points._asked = asked
    if not guardian:
        _without_guardian()
    subprocess.Popen = forked.Child  # type: ignore[misc,assignment]


def main() -> None:
    for module in (*_WARM, *forked.MODULES):
        importlib.import_module(module)
    from skyctl.cli import app
    from skyctl.core import following
    from skyctl.service import bring_up
    from skyctl.supervisor import daemon, replica

    app.register(app.VERBS)
    # a user does not see these steps; a thousand cycles do
    bring_up.FOLLOW_POLL_S = following.FOLLOW_POLL_S = replica.READY_POLL_S = 0.02
    daemon._spawn = ask_for_supervisor  # type: ignore[assignment]
    os.set_blocking(_asks, False)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _run(asked)
        code = _ended(pid, asked["timeout_s"], asked["guardian"])
        answer = {"code": code, "seconds": time.monotonic() - began}
        print(json.dumps(answer), flush=True)


def _run(asked: dict[str, Any]) -> None:
    """The command, in the forked child. Never returns."""
    out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(os.open(asked["out"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    os.chdir(asked["cwd"])
    _as_if_started(asked["env"], asked["guardian"])
    sys.argv = ["skyctl", *asked["argv"]]
    code = 1
    try:
        from skyctl.cli.app import main as skyctl

        skyctl()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _without_guardian() -> None:
    from skyctl.core import guardian

    def none(paths: object) -> None:
        raise OSError("this cycle recovers by hand")

    guardian._spawn = none  # type: ignore[assignment]


def _ended(pid: int, timeout_s: float, guardian: bool) -> int:
    """Wait for a command, and start the supervisors it asks for."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(_asks, 65536).splitlines():
                _fork_supervisor(json.loads(line), guardian)
        for child in list(_children):
            if os.waitpid(child, os.WNOHANG)[0]:
                _children.discard(child)
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.005)


class Zygote:
    """The warm process, seen from a test."""

    def __init__(self, directory: Path) -> None:
        self._out = directory / "command.out"
        root = Path(__file__).parents[3]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.killing.zygote", forked.ROOM[0]],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "SKYCTL_TEST_ROOM": forked.ROOM[1]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us, who still need it to bring the fleet down
        )
        self._answer()

    def run(
        self, *argv: str, cwd: Path, env: dict[str, str], guardian: bool, timeout_s: float = 60.0
    ) -> tuple[int, dict[str, Any], str]:
        """One command: its exit code (negative: the signal), its envelope if any, and stderr."""
        assert self._process.stdin is not None
        asked = {
            "argv": argv,
            "cwd": str(cwd),
            "env": env,
            "out": str(self._out),
            "guardian": guardian,
            "timeout_s": timeout_s,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        code = int(self._answer()["code"])
        text = self._out.read_text()
        try:
            envelope: dict[str, Any] = json.loads(text)
        except ValueError:
            envelope = {}
        return code, envelope, Path(f"{self._out}.err").read_text()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # amid a command
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote ended")
        found: dict[str, Any] = json.loads(line)
        return found


if __name__ == "__main__":
    main()
