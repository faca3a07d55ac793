"""`skyctl` commands for tests without their imports, which take a third of a second of a processor:
a process that has made them forks one for each command.

`Command` is `subprocess.Popen` for `[sys.executable, "-m", "skyctl", …]`. Only tests `use()` it;
benchmarks measure real ones.
"""

from __future__ import annotations

import array
import atexit
import gc
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_MODULES = (
    *("asyncio", "httpx", "sqlite3", "rich.console", "rich.live", "rich.table", "yaml"),
    *("skyctl.cli.app", "skyctl.cli.pause", "skyctl.cli.sync_weights", "skyctl.cli.up"),
    *("skyctl.cli.status", "skyctl.cli.fleet_view", "skyctl.cli.job_view", "skyctl.cli.weights"),
    *("skyctl.fleetfile.load", "skyctl.output", "skyctl.service.attached"),
    *("skyctl.service.bring_up", "skyctl.service.bring_down", "skyctl.service.supervised"),
    *("skyctl.service.unsupervised", "skyctl.supervisor.client", "skyctl.core.check"),
    *("skyctl.core.planning", "skyctl.push.transaction"),
)
_MOST_BYTES = 1 << 20
_STATUS = 4
_in_use = False


def use() -> None:
    """Commands are forked from here on, in this process."""
    global _in_use
    _in_use = True


# --- for tests ------------------------------------------------------------------------------------

_forker: tuple[subprocess.Popen[bytes], socket.socket] | None = None
_lock = threading.Lock()


def _ask(request: bytes, descriptors: Sequence[int]) -> int:
    """The pid of a command that was started by it."""
    global _forker
    with _lock:
        if _forker is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
                    cwd=Path(__file__).parents[1],
                    pass_fds=[theirs.fileno()],
                )
            _forker = process, ours
            atexit.register(_end)
        sent = array.array("i", descriptors)
        channel = _forker[1]
        channel.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        return int(channel.recv(64))


def _end() -> None:
    if _forker is not None:
        _forker[1].close()
        _forker[0].wait(timeout=20)


class Command(subprocess.Popen[str]):
    """A command; `args` are what comes behind the interpreter."""

    def _execute_child(self, *arguments: Any) -> None:
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
        given = dict(zip(names, arguments, strict=True))
        told, tell = os.pipe2(os.O_CLOEXEC)
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "argv": [os.fspath(one) for one in given["args"]][3:],
            "cwd": os.fspath(given["cwd"]),
            "env": dict(given["env"]),
        }
        try:
            self.pid = _ask(
                json.dumps(request).encode(),
                [*(own if own != -1 else number for number, own in enumerate(streams)), tell],
            )
            self._told = told
            self._child_created = True
        finally:
            os.close(tell)
            self._close_pipe_fds(  # type: ignore[attr-defined]
                *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
                *(given[name] for name in ("errread", "errwrite")),
            )

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        timeout_ms = 0 if wait_flags & os.WNOHANG else None
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        if not poll.poll(timeout_ms):
            return 0, 0
        status = os.read(self._told, _STATUS)
        os.close(self._told)
        # nothing is told where the forker was killed
        return self.pid, int.from_bytes(status, "little") if status else signal.SIGKILL

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def command(arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """`[interpreter, "-m", "skyctl", …]`, forked where that is in use."""
    return (Command if _in_use else subprocess.Popen)(arguments, **options)


# --- the process that forks -----------------------------------------------------------------------


def main(channel: socket.socket) -> None:
    """Start what is asked for, and tell how it ended, until nobody asks any more."""
    from importlib import import_module

    for name in _MODULES:
        import_module(name)
    gc.freeze()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # pid and where to tell, by pidfd
    while True:
        for ready, _ in poll.poll():
            if ready == channel.fileno():
                if not _start(channel, poll, running):
                    return
            else:
                pid, tell = running.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                os.write(tell, os.waitpid(pid, 0)[1].to_bytes(_STATUS, "little"))
                os.close(tell)


def _start(channel: socket.socket, poll: select.poll, running: dict[int, tuple[int, int]]) -> bool:
    """Fork a command; False when nobody asks any more."""
    request, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, 4)
    if not request:
        return False
    *streams, tell = descriptors
    pid = os.fork()
    if not pid:
        _be(json.loads(request), streams, [channel.detach(), tell, *running])
    for stream in streams:
        os.close(stream)
    pidfd = os.pidfd_open(pid)
    running[pidfd] = pid, tell
    poll.register(pidfd, select.POLLIN)
    channel.send(str(pid).encode())
    return True


def _be(request: dict[str, Any], streams: Sequence[int], others: Sequence[int]) -> NoReturn:
    """Be that command."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in (*streams, *others):
        if descriptor > 2:
            os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["skyctl", *request["argv"]]
    from skyctl.__main__ import main as skyctl

    os._exit(_exit_code(skyctl))


def _exit_code(run: Callable[[], None]) -> int:
    """As the interpreter makes it of what a program ends with."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(socket.socket(fileno=int(sys.argv[1])))
