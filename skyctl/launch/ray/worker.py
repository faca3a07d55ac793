"""Code that runs in Ray's workers: processes of a machine, each with pipes.

Carried there by value, so that a worker needs no skyctl. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

_PIECE = 64 * 1024
_LAST_WORDS = 4096
_GENTLY_S = 2.0
_NOT_FOUND = 127
# what Ray puts into the environment of a worker, and a server must not inherit: one thread per
# process, a debugger, the cluster's token
_OF_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


def environment(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """The part of a worker's environment that an agent gets, and the address that servers bind."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OF_RAY and not name.startswith("RAY_")
    }
    return {**kept, "SKYCTL_NODE_ADDRESS": address}


def _popen(argv: Sequence[str], address: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(os.environ, address),
        cwd=os.path.expanduser("~"),  # noqa: PTH111 - as sshd has it
    )


class Worker:
    """Runs processes, for an actor that handles many calls at once. Who starts one names it."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}

    def ping(self) -> None:
        """Answer, if the actor lives."""

    def place(self, address: str) -> tuple[int, str]:
        """A free port at the node's address, and the GPUs that Ray shows to this worker."""
        with socket.create_server((address, 0)) as free:
            return free.getsockname()[1], os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def ask(self, argv: Sequence[str], address: str, line: bytes) -> tuple[int, bytes, bytes]:
        """One question to an agent of its own: its exit code, output and stderr."""
        try:
            agent = _popen(argv, address)
        except OSError as error:
            return _NOT_FOUND, b"", str(error).encode()
        stdout, stderr = agent.communicate(line)
        return agent.returncode, stdout, stderr[-_LAST_WORDS:]

    def start(self, name: str, argv: Sequence[str], address: str) -> None:
        """Start one. If it cannot be started, it ends as a shell would report it."""
        self._processes[name] = _Process(argv, address)

    def write(self, name: str, data: bytes) -> None:
        """Write to its stdin; b"" closes it."""
        if (process := self._processes.get(name)) is not None:
            process.write(data)

    def read(self, name: str) -> bytes:
        """Its next output; b"" at the end."""
        process = self._processes.get(name)
        return process.read() if process else b""

    def end(self, name: str) -> tuple[int, bytes]:
        """Its exit code, and the end of its stderr. It is forgotten."""
        ended = self._processes[name].end()
        self._processes.pop(name, None)
        return ended

    def stop(self, name: str) -> None:
        """Nobody reads it any more: close its stdin, and kill it if that does not end it."""
        if (process := self._processes.pop(name, None)) is not None:
            process.stop()


class _Process:
    def __init__(self, argv: Sequence[str], address: str) -> None:
        self._code, self._last_words = _NOT_FOUND, b""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = _popen(argv, address)
        except OSError as error:
            self._last_words = str(error).encode()
            return
        self._draining = threading.Thread(target=self._drain, args=(self._process,), daemon=True)
        self._draining.start()

    def write(self, data: bytes) -> None:
        if self._process is None:
            return
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # `read` reports the end
            if data:
                stdin.write(data)
                stdin.flush()
            else:
                stdin.close()

    def read(self) -> bytes:
        if self._process is None:
            return b""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _PIECE)

    def end(self) -> tuple[int, bytes]:
        if self._process is not None:
            self._code = self._process.wait()
            self._draining.join(1.0)
        return self._code, self._last_words

    def stop(self) -> None:
        self.write(b"")
        if self._process is not None:
            try:
                self._process.wait(_GENTLY_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        while data := os.read(process.stderr.fileno(), _LAST_WORDS):
            self._last_words = (self._last_words + data)[-_LAST_WORDS:]
