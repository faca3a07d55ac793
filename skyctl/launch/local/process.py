"""One child process and everything below it: spawned in its own session, stopped as a whole.

A signal is sent only to a process whose identity (pid, create time, boot) is known to be ours: the
leader, descendants recorded while they lived, members of the leader's session, and processes that
carry the child's token in their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from skyctl.children import child_environment
from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.launch.base import ChosenPlace
from skyctl.launch.local import segments
from skyctl.store.identity import (
    ProcessIdentity,
    boot_id,
    create_time,
    environment,
    has_ended,
    identify,
    own_processes,
)
from skyctl.store.paths import FleetPaths, create_private_file
from skyctl.store.processes import LOG_VARIABLE, SPAWN_VARIABLE

KILL_TIMEOUT_S = 30.0
"""A killed process exists until its memory is freed: seconds for several GB."""
_POLL_S = 0.05


def start_detached(
    argv: Sequence[str], paths: FleetPaths, log: Path, *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process of skyctl's own for a fleet, in a session that survives what kills ours; its
    output is appended to `log`. Raises OSError, StateUnwritable.
    """
    descriptor = create_private_file(log, os.O_APPEND)
    try:
        return subprocess.Popen(
            argv,
            env=child_environment({"SKYCTL_HOME": str(paths.root)}),
            stdin=stdin,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(descriptor)


class ManagedProcess:
    """A `ChildProcess`: a child, or a process adopted from an earlier supervisor."""

    def __init__(
        self,
        identity: ProcessIdentity | None,
        token: str,
        descendants: Iterable[ProcessIdentity] = (),
        *,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.identity = identity
        self.token = token
        self.descendants = tuple(descendants)
        self.segments: frozenset[segments.Segment] = frozenset()
        self.exited = asyncio.Event()
        self._popen = popen
        self._watch()

    @classmethod
    def spawn(
        cls, argv: Sequence[str], env: Mapping[str, str], log: Path, token: str
    ) -> ManagedProcess:
        """Start `argv` in a new session; `env` is added to ours, output is appended to `log`.

        Raises:
            SkyctlError: the program does not exist or cannot be started.
        """
        descriptor = _open_log(log)
        try:
            popen = subprocess.Popen(
                list(argv),
                env=child_environment({**env, SPAWN_VARIABLE: token, LOG_VARIABLE: str(log)}),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise SkyctlError(f"cannot start {argv[0]}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return cls(identify(popen.pid), token, popen=popen)

    @property
    def pid(self) -> int | None:
        return self.identity.pid if self.identity else None

    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()

    def exit_text(self) -> str:
        code = self._popen.poll() if self._popen is not None else None
        if code is None:
            return "exited"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def record_descendants(self) -> bool:
        leader = self.identity.process() if self.identity else None
        living = {d for d in self.descendants if d.alive()}
        below = _children(leader) if leader else []
        seen = {identity for child in below if (identity := identify(child.pid)) is not None}
        if seen <= living and len(living) == len(self.descendants):
            return False
        self.descendants = tuple(sorted(seen | living, key=lambda d: d.pid))
        return True

    def record_segments(self) -> None:
        """Of this tree: once it is gone, nothing shows what it has left."""
        self.segments |= segments.mapped_by(process.pid for process in self.members())

    def place(self) -> ChosenPlace | None:
        return None  # it runs where it was planned

    def connection_lost(self) -> str:
        return ""  # it runs here

    def listens_at(self, port: int) -> bool:
        try:
            return any(port in listening_ports(process) for process in self._recorded())
        except psutil.AccessDenied:  # the kernel does not say
            return True

    def members(self) -> list[psutil.Process]:
        """Every live process of this tree, wherever its parents went."""
        if self.identity is not None and self.identity.boot_id != boot_id():
            return []
        members: dict[int, psutil.Process] = {}
        for root in self._recorded():
            members[root.pid] = root
            members.update((child.pid, child) for child in _children(root))
        for process in own_processes():
            if process.pid not in members and (self._in_session(process) or self._tagged(process)):
                members[process.pid] = process
        return [p for p in members.values() if _running(p)]

    def resident_bytes(self) -> int | None:
        """Of the leader and its known descendants; shared pages are counted in each."""
        if self.identity is None:
            return None
        total = 0
        for process in self._recorded():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    async def lost(self) -> str:
        return ""  # it runs here

    async def settled(self) -> None:
        pass  # it reads the files themselves

    async def stop(self, timeout_s: float) -> bool:
        """TERM to the whole tree, wait up to `timeout_s`, KILL what is left, reap. Raises
        SkyctlError: a process survived KILL (it hangs in the kernel).
        """
        members = self.members()
        self.segments |= segments.mapped_by(process.pid for process in members)
        _signal(members, signal.SIGTERM)
        remaining = await self._gone(members, timeout_s)
        # a process may have started since, or was missed at first
        remaining = remaining or self.members()
        gently = not remaining
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while remaining:
            # Python's resource trackers end by themselves once their users are gone, and then
            # remove the shared memory those left; killed together with them, they leak it
            users = [process for process in remaining if not _is_resource_tracker(process)]
            _signal(users or remaining, signal.SIGKILL)
            await self._gone(remaining, 1.0)
            remaining = self.members()
            if remaining and time.monotonic() > deadline:
                pids = ", ".join(str(p.pid) for p in remaining)
                raise SkyctlError(f"processes {pids} outlived SIGKILL; they hang in the kernel")
        self._reap(members)
        segments.remove(self.segments)
        self.descendants, self.segments = (), frozenset()
        await self.exited.wait()
        return gently

    async def _gone(self, members: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
        deadline = time.monotonic() + timeout_s
        while remaining := [p for p in members if _running(p)]:
            if time.monotonic() > deadline:
                return remaining
            self._reap(remaining)
            await asyncio.sleep(_POLL_S)
        return []

    def _reap(self, members: Iterable[psutil.Process]) -> None:
        if self._popen is not None:
            self._popen.poll()
        for member in members:
            # orphaned grandchildren become ours (see daemon.become_subreaper)
            if member.pid != self.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(member.pid, os.WNOHANG)

    def _recorded(self) -> list[psutil.Process]:
        """The leader and the recorded descendants that live."""
        identities = (self.identity, *self.descendants)
        processes = (identity.process() for identity in identities if identity is not None)
        return [process for process in processes if process is not None]

    def _in_session(self, process: psutil.Process) -> bool:
        if self.identity is None or not hasattr(os, "getsid"):
            return False
        try:
            if os.getsid(process.pid) != self.identity.pid:
                return False
        except OSError:
            return False
        # the leader's pid is not reused while its session lives; if another process has it now,
        # this is another session with the same number
        leader = identify(self.identity.pid)
        if leader is not None and abs(leader.create_time - self.identity.create_time) > 0.05:
            return False
        created = create_time(process.pid)
        return created is not None and created >= self.identity.create_time - 0.05

    def _tagged(self, process: psutil.Process) -> bool:
        return environment(process.pid).get(SPAWN_VARIABLE) == self.token

    def _watch(self) -> None:
        """Set `exited` when the leader ends, without polling if the kernel supports it."""
        if not self.alive() or self.identity is None:
            self.exited.set()
            return
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(self.identity.pid)
        except (AttributeError, OSError):
            self._poller = loop.create_task(self._poll_exit())
            return

        def gone() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self.exited.set()

        loop.add_reader(descriptor, gone)

    async def _poll_exit(self) -> None:
        while self.alive():  # noqa: ASYNC110 - without a pidfd nothing notifies us
            await asyncio.sleep(0.5)
        self.exited.set()


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def listening_ports(process: psutil.Process) -> set[int]:
    """Raises psutil.AccessDenied if the kernel does not say."""
    connections = getattr(process, "net_connections", None) or process.connections  # psutil < 6
    try:
        sockets = connections(kind="tcp")
    except psutil.NoSuchProcess:
        return set()
    return {socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN}


def _running(process: psutil.Process) -> bool:
    try:
        # is_running compares create times, so a reused pid counts as gone
        return process.is_running() and not has_ended(process)
    except psutil.Error:
        return False


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _signal(members: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in members:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _open_log(log: Path) -> int:
    """Open the log, or /dev/null: a server without a log is better than none."""
    try:
        return create_private_file(log, os.O_APPEND)
    except StateUnwritable:  # a read-only or full disk
        return os.open(os.devnull, os.O_WRONLY)
