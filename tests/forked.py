"""What a forked command, supervisor or tether starts is forked from it (see forking.py): stub
servers, tethers, agents and senders, whose imports take a tenth or two of a second of a processor.

`Child` stands in for `subprocess.Popen` there. What it does not know is started as ever.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import inspect
import io
import multiprocessing.util
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    *("tests.stub.server", "tests.stub.follower", "uvicorn.config", "uvicorn.server"),
    *("uvicorn.protocols.http.httptools_impl", "http.server", "http.client", "runpy"),
    *("skyctl.launch.remote.agent", "skyctl.launch.remote.tether", "skyctl.transfer.sender"),
    *("skyctl.transfer.transports.shm", "skyctl.engines.inside.guard"),
)
"""To be imported before: it is what makes a fork cheap."""
_RUN = (
    *("tests.stub.server", "tests.stub.follower", "skyctl.transfer.sender"),
    *("skyctl.launch.remote.agent", "skyctl.launch.remote.tether"),
    *("skyctl.tinker", "skyctl.tinker.remote_worker", "skyctl.tinker.worker"),
    "tests.integration.apart",  # ranks, like those of the example below
)
_VLLM = (
    *("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker"),
    *("vllm.model_executor.models.qwen3", "skyctl.engines.vllm.inside.worker"),
)
_SERVE = ("skyctl.engines.vllm.inside.serve", "skyctl.engines.vllm.inside.headless")
_READ_BY_IMPORTS = ("OMP_", "HF_", "LD_PRELOAD", "VLLM_LOGGING")
"""How variables begin that matter as vLLM is imported, not later."""
_imported_with: dict[str, str] | None = None
_set_by_imports: dict[str, str] = {}
NETWORK = "SKYCTL_TEST_NETWORK"
"""Set to a process for those that are to run in its network namespace."""
_NEW_NETWORK = 0x40000000
ROOM = "." * 4000, "." * 20_000
"""For what /proc shows of a process and of its environment, in those of the first that forks."""
_ROOT = Path(__file__).parents[1]
_FILES = (
    *(str(_ROOT / "tests/stub/light.py"), str(_ROOT / "tests/unit/supervisor/fake_router.py")),
    str(_ROOT / "examples/fsdp_rl.py"),
)
_Popen = subprocess.Popen
_spawnv_passfds = multiprocessing.util.spawnv_passfds


def load_vllm() -> None:
    """Import what a real server does, where vLLM is installed: those of fleets are then forked."""
    global _imported_with
    if importlib.util.find_spec("vllm") is None:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # as skyctl starts a server on a directory
    before = dict(os.environ)
    for name in _VLLM:
        importlib.import_module(name)
    _set_by_imports.update(os.environ.items() - before.items())
    _imported_with = _of_imports(before)


def _of_imports(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_BY_IMPORTS)}


class Child(subprocess.Popen[Any]):
    """A child that is forked from this process where it knows how."""

    def _execute_child(self, *arguments: Any) -> None:
        names = list(inspect.signature(_Popen._execute_child).parameters)[1:]
        given = dict(zip(names, arguments, strict=True))
        env = dict(os.environ if given["env"] is None else given["env"])
        words = None if _special(given) else known([os.fspath(w) for w in given["args"]], env)
        if words is None or not fits(words, env):
            _Popen._execute_child(self, *arguments)
            return
        begun, begin = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.fork()
            if not self.pid:
                streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
                apart, passed = given["start_new_session"], given["pass_fds"]
                _become(words, env, streams, given["cwd"], apart, passed)
            self._child_created = True
        finally:
            os.close(begin)
            self._close_pipe_fds(  # type: ignore[attr-defined]
                *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
                *(given[name] for name in ("errread", "errwrite")),
            )
        os.read(begun, 1)  # nothing: as after an exec, it is what it is to be
        os.close(begun)


def _spawned(path: bytes, words: Sequence[str | bytes], descriptors: Sequence[int]) -> int:
    """The pid of a worker that a real server spawns, for its OpenMP to read what each is given;
    forked, it has the threads and the cores of the server."""
    argv, env = [os.fsdecode(word) for word in words], dict(os.environ)
    if "--multiprocessing-fork" not in argv or not fits(argv, env):
        return _spawnv_passfds(path, words, descriptors)
    if not (pid := os.fork()):
        _become(argv, env, [-1, -1, -1], None, False, descriptors)
    return pid


def _title(name: str) -> None:
    """What `ps` shows from now on; setproctitle does not find where the kernel reads that."""
    show([name], os.environ)


def _special(given: Mapping[str, Any]) -> bool:
    asked = ("preexec_fn", "executable", "shell")
    return isinstance(given["args"], str) or any(given[name] for name in asked)


def known(words: Sequence[str], env: dict[str, str]) -> list[str] | None:
    """The Python program that a command line comes to, if it is one of those that are forked;
    `env` becomes what it is then."""
    from skyctl.engines.vllm import arguments
    from tests.faults import stub_fleet

    if words[:2] == ["nsenter", "--net"]:
        env[NETWORK] = words[2].removeprefix("--target=")
        words = words[3:]
    if words[:2] == ["sh", "-c"] and words[2].startswith("exec "):
        words = shlex.split(text := words[2].removeprefix("exec "))
        if shlex.join(words) != text:  # the shell has more to do
            return None
    if words[0] == "env":
        words = _in_environment(words[1:], env)
    if words[0] != sys.executable and _is_program(words[0]):
        first = _first_line(words[0])
        if first == f"#!{sys.executable}":
            return [sys.executable, *words]
        if first == "#!/bin/sh" and Path(words[0]).read_text() == stub_fleet.INTERPRETER:
            env["PYTHONPATH"] = f"{_ROOT}:{env.get('PYTHONPATH', '')}"
            words = stub_fleet.stands_for(words[1:])
    if words[:1] != [sys.executable]:
        return None
    first, second, *_ = [*program(words), "", ""]
    if first == "-m" and second in _SERVE:
        if _imported_with != _of_imports(env):
            return None
        env |= _set_by_imports | env
        return list(words)
    if first == "-c":  # the arguments of vLLM's parser, asked once for each state directory
        return list(words) if _imported_with is not None and second == arguments._ASK else None
    ours = second in _RUN if first == "-m" else first in _FILES
    return list(words) if ours else None


def _in_environment(words: Sequence[str], env: dict[str, str]) -> list[str]:
    """What `env` would start."""
    rest = list(words)
    while rest[0] == "-u" or "=" in rest[0]:
        if rest[0] == "-u":
            env.pop(rest[1], None)
            rest = rest[2:]
        else:
            name, _, value = rest.pop(0).partition("=")
            env[name] = value
    return rest


def _is_program(word: str) -> bool:
    """A path, not a name that is looked up."""
    return "/" in word and Path(word).is_file() and os.access(word, os.X_OK)


def _first_line(file: str) -> str:
    with Path(file).open(errors="replace") as lines:
        return lines.readline(1000).rstrip("\n")


def _become(
    words: Sequence[str],
    env: Mapping[str, str],
    streams: Sequence[int],
    cwd: Any,
    new_session: bool,
    others: Collection[int] = (),
) -> NoReturn:
    """Be that program, in a process that was just forked."""
    code = 255
    try:
        gc.freeze()  # what is the parent's would close descriptors that are ours
        _forget(env)
        enter_network(env)
        if new_session:
            os.setsid()
        if cwd is not None:
            os.chdir(cwd)
        show(words, env)
        _take(streams, others)
        if program(words)[1] in _SERVE:
            multiprocessing.util.spawnv_passfds = _spawned
            vars(importlib.import_module("setproctitle"))["setproctitle"] = _title
        code = contextvars.Context().run(exit_code, lambda: run(words))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _forget(env: Mapping[str, str]) -> None:
    """What an exec would have ended."""
    from skyctl import kill_points, startup

    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            theirs = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if theirs else signal.SIG_DFL)
    asyncio.set_event_loop_policy(None)
    asyncio._set_running_loop(None)
    atexit._clear()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    sys.setswitchinterval(0.005)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(":") if path]
    startup._ours.clear()
    died = kill_points.VARIABLE in os.environ
    os.environ.clear()
    os.environ.update(env)
    if died or kill_points.VARIABLE in env:
        importlib.reload(kill_points)
    if worker := sys.modules.get("skyctl.engines.vllm.inside.worker"):
        vars(worker)["_STARTED_AT"] = time.time()


def enter_network(env: Mapping[str, str]) -> None:
    """Be in the network namespace that the environment names, if any."""
    if NETWORK in env:
        with Path(f"/proc/{env[NETWORK]}/ns/net").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"no entry to the network of {env[NETWORK]}")


def _take(streams: Sequence[int], others: Collection[int]) -> None:
    """Have these as stdin, stdout and stderr, and no files but these others."""
    given = [number if own == -1 else own for number, own in enumerate(streams)]
    apart = [fcntl.fcntl(own, fcntl.F_DUPFD, 3) for own in given]
    for number, own in enumerate(apart):
        os.dup2(own, number)
    for descriptor in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in others:
            with contextlib.suppress(OSError):  # that of the list
                os.close(descriptor)
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w", write_through=unbuffered)
    sys.stderr = _stream(2, "w", line_buffering=True, errors="backslashreplace")


def _stream(number: int, mode: str, **options: Any) -> io.TextIOWrapper:
    binary: Any = open(number, mode + "b", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(binary, encoding="utf-8", **options)


def program(words: Sequence[str]) -> list[str]:
    """A command line without the interpreter and its options."""
    return list(dropwhile(lambda word: word in ("-B", "-P", "-I", "-S", "-u"), words[1:]))


def run(words: Sequence[str]) -> None:
    """The program of `[interpreter, -m, MODULE, …]`, `[…, -c, TEXT]` or `[…, FILE, …]`."""
    arguments = program(words)
    if arguments[0] == "-m":
        _, module, *rest = arguments
        sys.argv = [module, *rest]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def show(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc show them as if this process had been started with them, where there is room."""
    if fits(words, env):
        here, end, env_here, env_end = _room()
        told, environ = _told(words, env)
        # an empty word would be one more: the path of the interpreter takes what is left
        ctypes.memmove(here, told.rjust(end - here, b"/"), end - here)
        ctypes.memmove(env_here, environ.ljust(env_end - env_here, b"\0"), env_end - env_here)


def fits(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether /proc can show them of this process."""
    here, end, env_here, env_end = _room()
    told, environ = _told(words, env)
    return len(told) <= end - here and len(environ) <= env_end - env_here


def _room() -> list[int]:
    """Where the kernel finds its arguments and its environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[45:49]]


def _told(words: Sequence[str], env: Mapping[str, str]) -> tuple[bytes, bytes]:
    environ = "".join(f"{name}={value}\0" for name, value in env.items())
    return os.fsencode("\0".join([*words, ""])), os.fsencode(environ)


def exit_code(run: Callable[[], None]) -> int:
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
