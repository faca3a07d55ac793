"""`skyctl` commands for tests without their imports, which take a third of a second of a processor:
a process that has made them forks one for each command, and for each supervisor that one starts.
What these start in turn is in forked.py.

`Command` is `subprocess.Popen` for `[sys.executable, "-m", MODULE, …]`; /proc shows what it was
given. Tests `use()` it, and the cycles of `benchmarks.kill_points`; other benchmarks measure real
ones.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

from skyctl.startup import inherited_environment
from skyctl.store.paths import FleetPaths, create_private_file
from tests import forked

_TRAINING = "tests.processes.tinker.serving"
VLLM = "vllm"
"""For commands whose supervisors fork real servers, which import vLLM for most of their start."""
TRAINING_MODULES = (
    *("skyctl.tinker.worker", "skyctl.tinker.__main__", "skyctl.tinker.training", "httpx"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3"),
)  # of an API with a worker, four seconds of a processor: for them another process
TORCH = "torch"
"""For fleets whose senders and servers meet in gloo groups."""
_OF_TORCH = ("skyctl.transfer.transports.gloo", "skyctl.engines.vllm.inside.receivers.gloo")
TRAINER = "trainer"
"""For fleets with a Tinker API."""
_SDK = "tinker"
_COOKBOOK = ("tinker_cookbook.supervised.train", "tinker_cookbook.rl.train")
_OF_SDK = (
    *(_COOKBOOK if importlib.util.find_spec("tinker_cookbook") else ()),
    *("tinker", "transformers.models.auto.tokenization_auto"),
)  # of a script, eight seconds of a processor
_MORE: Mapping[str, Sequence[str]] = {
    _TRAINING: TRAINING_MODULES,
    TRAINER: TRAINING_MODULES,
    TORCH: _OF_TORCH,
    _SDK: _OF_SDK,
}
_MODULES = (
    *("asyncio", "httpx", "sqlite3", "rich.console", "rich.live", "rich.table", "yaml"),
    *("skyctl.cli.app", "skyctl.cli.freeze", "skyctl.cli.sync_weights", "skyctl.cli.up"),
    *("skyctl.cli.status", "skyctl.cli.fleet_view", "skyctl.cli.job_view", "skyctl.cli.weights"),
    *("skyctl.fleetfile.load", "skyctl.output", "skyctl.service.attached"),
    *("skyctl.service.bring_up", "skyctl.service.bring_down", "skyctl.service.supervised"),
    *("skyctl.service.unsupervised", "skyctl.supervisor.client", "skyctl.core.check"),
    *("skyctl.core.planning", "skyctl.push.transaction", "skyctl.supervisor.daemon"),
    *("skyctl.api.fleet", "tests.unit.push.checkpoints"),  # of a trainer
)
CYCLE = "SKYCTL_TEST_CYCLE"
"""Set for commands, and what they start, that are to look often, since a thousand of them follow
each other; "by hand": without the guardian of a push."""
_MOST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 8
_STATUS = 4
_in_use = False
_servers = ""


def use(servers: str = "") -> None:
    """Commands are forked from here on, in this process; for `VLLM` their real servers, too."""
    global _in_use, _servers
    _in_use, _servers = True, servers


# --- for tests ------------------------------------------------------------------------------------

_forkers: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}  # by what they are for
_lock = threading.Lock()


def _ask(request: bytes, descriptors: Sequence[int], kind: str) -> int:
    """The pid of a command that was started by it."""
    with _lock:
        if kind not in _forkers:
            room, more_room = forked.ROOM
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.forking", str(theirs.fileno()), kind, room],
                    cwd=Path(__file__).parents[1],
                    env={**os.environ, "SKYCTL_TEST_ROOM": more_room},
                    pass_fds=[theirs.fileno()],
                )
            _forkers[kind] = process, ours
            atexit.register(_end, process, ours)
        sent = array.array("i", descriptors)
        channel = _forkers[kind][1]
        channel.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
        return int(channel.recv(64))


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.wait(timeout=20)


class Command(subprocess.Popen[str]):
    """A command: what an interpreter is started with."""

    of = ""
    """What the process that forks it is for, if not what tests `use`."""

    def _execute_child(self, *arguments: Any) -> None:
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
        given = dict(zip(names, arguments, strict=True))
        told, tell = os.pipe2(os.O_CLOEXEC)
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        passed = tuple(given["pass_fds"])
        request = _request(given["args"], given["cwd"], given["env"], passed)
        kind = _TRAINING if _TRAINING in given["args"] else self.of or _servers
        try:
            self.pid = _ask(
                request,
                [*(own if own != -1 else n for n, own in enumerate(streams)), tell, *passed],
                kind,
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

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None and timeout is not None:
            poll = select.poll()  # whose end is heard of at once
            poll.register(self._told, select.POLLIN)
            if not poll.poll(max(0.0, timeout) * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout)
        return int(super()._wait(None))  # type: ignore[misc]

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


class TrainingCommand(Command):
    """Forked from a process with the imports of a trainer."""

    of = _TRAINING


class SdkCommand(Command):
    """Forked from a process with the imports of a script that uses Tinker's SDK or cookbook."""

    of = _SDK


def _request(
    words: Sequence[Any], cwd: Any, env: Mapping[str, str] | None, passed: Sequence[int] = ()
) -> bytes:
    request = {
        "argv": [os.fspath(word) for word in words],
        "cwd": os.fspath(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
        "passed": passed,
    }
    return json.dumps(request).encode()


def command(arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """`[interpreter, "-m", "skyctl", …]`, forked where that is in use."""
    return (Command if _in_use else subprocess.Popen)(arguments, **options)


def detached(argv: Sequence[str], paths: FleetPaths, log: Path) -> subprocess.Popen[str]:
    """`start_detached` of a supervisor in a test, which is then forked like a command's."""
    with os.fdopen(create_private_file(log, os.O_APPEND), "ab") as output:
        return command(
            argv,
            env={**inherited_environment(), "SKYCTL_HOME": str(paths.root)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
        )


# --- the process that forks -----------------------------------------------------------------------


def main(channel: socket.socket, kind: str) -> None:
    """Start what is asked for, and tell how it ended, until nobody asks any more."""
    gc.disable()
    of_skyctl = kind not in (_TRAINING, _SDK)
    if kind == _SDK:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by the imports
    for name in (*(_MODULES if of_skyctl else ()), *_MORE.get(kind, ())):
        importlib.import_module(name)
    if kind == VLLM:
        forked.load_vllm()
    asked, Supervisor.ask = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if of_skyctl:
        from skyctl.supervisor import daemon

        for name in forked.MODULES:
            importlib.import_module(name)
        daemon.load_everything()
        _build_adapters()
        daemon.start_detached = Supervisor  # type: ignore[assignment]
    gc.freeze()
    gc.enable()
    poll = select.poll()
    for incoming in (channel, asked):
        poll.register(incoming, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # pid and where to tell, by pidfd
    while True:
        for ready, _ in poll.poll():
            if ready == asked.fileno():
                _start(asked, poll, running, [channel.fileno(), asked.fileno()])
            elif ready == channel.fileno():
                if pid := _start(channel, poll, running, [channel.fileno(), asked.fileno()]):
                    channel.send(str(pid).encode())
                else:
                    return
            else:
                pid, tell = running.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                with contextlib.suppress(BrokenPipeError):  # the command that started it is gone
                    os.write(tell, os.waitpid(pid, 0)[1].to_bytes(_STATUS, "little"))
                os.close(tell)


def _build_adapters() -> None:
    """What carries requests and results between commands and supervisors."""
    from skyctl.core import requests
    from skyctl.core.status import FleetStatus
    from skyctl.supervisor import interface, wire

    results = (FleetStatus, requests.Outcomes, requests.TakenDown)
    asked = (verb.request for verb in interface.own_handlers(Mock()))
    for kind in (*asked, *results, interface.Begun):
        wire.adapter(kind)


def _start(
    channel: socket.socket,
    poll: select.poll,
    running: dict[int, tuple[int, int]],
    others: Sequence[int],
) -> int:
    """Fork a command; its pid, 0 when nobody asks any more."""
    request, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, _MOST_DESCRIPTORS)
    if not request:
        return 0
    streams, (tell, *passed) = descriptors[:3], descriptors[3:]
    pid = os.fork()
    if not pid:
        tells = [tell for _, tell in running.values()]
        _be(json.loads(request), streams, [*others, tell, *running, *tells], passed)
    for descriptor in (*streams, *passed):
        os.close(descriptor)
    pidfd = os.pidfd_open(pid)
    running[pidfd] = pid, tell
    poll.register(pidfd, select.POLLIN)
    return pid


class Supervisor:
    """`start_detached` in a command: who forked the command forks the supervisor."""

    ask: socket.socket

    def __init__(self, argv: Sequence[str], paths: FleetPaths, log: Path) -> None:
        self._told, tell = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = create_private_file(log, os.O_APPEND)
        try:
            env = {**inherited_environment(), "SKYCTL_HOME": str(paths.root)}
            streams = [nothing, output, output, tell]
            socket.send_fds(self.ask, [_request(argv, "/", env)], streams)
        finally:
            for descriptor in (nothing, output, tell):
                os.close(descriptor)

    def poll(self) -> int | None:
        """Something, once it has ended."""
        ready, _, _ = select.select([self._told], [], [], 0)
        return 1 if ready else None


def _be(
    request: dict[str, Any], streams: Sequence[int], others: Sequence[int], passed: Sequence[int]
) -> NoReturn:
    """Be that command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    numbers = [*range(len(streams)), *request["passed"]]
    apart = [fcntl.fcntl(own, fcntl.F_DUPFD, max(numbers) + 1) for own in (*streams, *passed)]
    for descriptor in (*streams, *passed, *others):
        if descriptor > 2:
            os.close(descriptor)
    for number, own in zip(numbers, apart, strict=True):
        os.dup2(own, number)
        os.close(own)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    forked.enter_network(request["env"])
    forked.show(request["argv"], request["env"])
    _, _, module, *arguments = request["argv"]
    from skyctl import kill_points

    if kill_points.VARIABLE in os.environ:
        importlib.reload(kill_points)
    if module == "skyctl":
        from skyctl.__main__ import main as run

        sys.argv = [module, *arguments]
    else:
        Supervisor.ask.close()  # a command's only
        run = functools.partial(forked.run, request["argv"])
    if CYCLE in os.environ:
        _be_quick(guardian=os.environ[CYCLE] != "by hand")
    if module == "skyctl.supervisor":
        os.setsid()
    subprocess.Popen = forked.Child  # type: ignore[misc,assignment]
    os._exit(forked.exit_code(run))


def _be_quick(*, guardian: bool) -> None:
    from skyctl.core import following
    from skyctl.core import guardian as guardians
    from skyctl.service import bring_up
    from skyctl.supervisor import replica

    bring_up.FOLLOW_POLL_S = following.FOLLOW_POLL_S = replica.READY_POLL_S = 0.02

    def none(_: FleetPaths) -> NoReturn:
        raise OSError("this one is recovered by hand")

    if not guardian:
        guardians._spawn = none


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # to a group: they are the commands'
        signal.signal(number, signal.SIG_IGN)
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
