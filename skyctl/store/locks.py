"""Named locks of a fleet, or of servers, kept by the kernel: they need no room on the disk and die
with their holder.

A lock is an flock on a file in the fleet's directory, or in that of all servers' locks. Its holder
is read from /proc/locks, so it is known even where nothing can be written; what the holder is doing
is in the file if there was room for it. A process that the holder forks does not have the lock
(`owned.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from skyctl.errors import ConflictError, SkyctlError, StateUnwritable
from skyctl.startup import is_command
from skyctl.store.identity import create_time
from skyctl.store.owned import FileLock, after_fork_in_child
from skyctl.store.paths import create_private_file, flocked
from skyctl.store.stopped import end_stopped, is_stopped
from skyctl.units import format_seconds

ASKED = ", asked for by "
"""In a holder's description: separates what it does from the command that asked for it."""

_POLL_S = 0.05
_MAX_RECORD_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """The holder of a lock."""

    activity: str
    """A command or a job."""
    pid: int
    """Of its process."""
    since: float
    """Epoch seconds."""
    created: float = 0.0
    """When its process was created (`identity.create_time`); 0 if that is not on record."""
    is_command: bool = False
    """A command or a supervisor of skyctl, which may be killed; not a program that uses it."""
    fleet: str = ""
    """The fleet that it acts for."""
    repairs: bool = False
    """Whether its fleet has to repair what it left: it died in a push, or its push failed."""
    ended: bool = False
    """Whether it has released the lock, and no request of it is on its way."""

    @property
    def subject(self) -> str:
        """What it does, without the command that asked for it."""
        return self.activity.partition(",")[0]

    def __str__(self) -> str:
        duration = format_seconds(max(0.0, time.time() - self.since))
        does, separator, by = self.activity.partition(ASKED)
        stopped = ", stopped" if self.stopped else ""
        if by and not stopped:
            # name the command that asked: the process that acts for it is the supervisor
            return f"{does} for {duration}{separator}{by}"
        return f"{does} (pid {self.pid}, for {duration}{stopped}){separator}{by}"

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped, and so keeps others out until it is continued."""
        return is_stopped(self.pid)

    def hint(self, otherwise: str) -> str:
        """What to type while it keeps others out: `otherwise`, unless it is stopped."""
        return stopped_hint(self.pid) if self.stopped else otherwise

    def wait_hint(self, fleet: str = "") -> tuple[str, str]:
        """Its push job, "" if it has none, and how to wait for it; `fleet` if it is of another."""
        job = self.subject if self.subject.startswith("push-") else ""
        if not job:
            return "", "wait for it to end"
        return job, f"wait for it: skyctl jobs wait {job}" + (f" --fleet {fleet}" if fleet else "")

    def end_stopped(self) -> bool:
        """Kill its process, if it is a stopped command of skyctl; returns whether it was."""

        def still() -> bool:
            return create_time(self.pid) == self.created

        return self.is_command and self.pid != os.getpid() and end_stopped(self.pid, still)


class News:
    """Tells tasks of one event loop that a job of this process has ended, or that a lock was
    released. Nothing is stored: a waiter learns of what happens from then on.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters. For the thread of their event loop."""
        self._event.set()
        self._event.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Whether something happened within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._event.wait()
        except TimeoutError:
            return False


class Lock:
    """One taken lock. Shared locks of one name coexist; an exclusive one excludes all others.

    `after_death`: an earlier holder died with it: what it did is still in the file, and stays there
    until `forget_dead`. Of several that share a lock, the file names the first.
    """

    def __init__(
        self, locks: Locks, name: str, file: FileLock, shared: bool, activity: str, repairs: bool
    ) -> None:
        self.name = name
        self.shared = shared
        pid = os.getpid()
        created = create_time(pid) or 0.0
        self.holder = Holder(
            activity, pid, time.time(), created, is_command(), locks.fleet, repairs=repairs
        )
        self._locks = locks
        self._file = file
        self.after_death = _has_record(file.fileno()) and not (shared and locks.lives(name))
        self._locks.own.add(self)
        self._record()

    def rename(self, activity: str) -> None:
        """Describe more precisely what the holder does."""
        self.holder = replace(self.holder, activity=activity)
        self._record()
        self._locks.news.notify()

    def release(self, *, repairs: bool = False) -> None:
        """Release the lock. A second call does nothing. `repairs`: what it was taken for is not
        repaired yet, and the file goes on to say so.
        """
        if self not in self._locks.own:  # it is released, or belongs to the process that forked us
            return
        if repairs and not self.after_death:
            self.holder = replace(self.holder, repairs=True, ended=True)
            self._record()
            self.after_death = True
        self._locks.own.discard(self)
        if not self.after_death:
            with contextlib.suppress(OSError):
                self._remove_record(self._file.fileno())
        self._file.close()
        self._locks.news.notify()

    @property
    def may_be_late(self) -> bool:
        """Whether requests of an earlier holder that died may still be on their way."""
        before = self._locks.recorded(self.name) if self.after_death else None
        return self.after_death and not (before is not None and before.ended)

    def forget_dead(self) -> None:
        """Forget a holder that died: it can do no more harm."""
        self.after_death = False
        if self in self._locks.own:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), 0)
        self._record()

    def _remove_record(self, descriptor: int) -> None:
        """Clear the file, or leave it to a process that still shares the lock."""
        if self.shared:
            recorded = self._locks.recorded(self.name)
            if recorded is None or recorded.pid != os.getpid():
                return
            if not self._file.take(shared=False):  # others share it
                if others := _locking_pids(os.fstat(descriptor)) - {os.getpid()}:
                    self._write(descriptor, _by_process(min(others)))
                return
        os.ftruncate(descriptor, 0)

    def _record(self) -> None:
        if self.after_death or self not in self._locks.own:
            return
        descriptor = self._file.fileno()
        if self.shared and _has_record(descriptor):
            return
        with contextlib.suppress(OSError):  # a full disk: the kernel still knows the process
            self._write(descriptor, self.holder)

    def _write(self, descriptor: int, holder: Holder) -> None:
        text = json.dumps(vars(holder)).encode()
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))


class Locks:
    """The locks of one fleet's directory. `news` is notified when one is released; `on_taken` is
    called when one is taken: what its holder read of the fleet may be outdated.
    """

    own_of_directory: dict[Path, set[Lock]] = {}  # noqa: RUF012 - shared by all of this process
    directory_stands_in = True
    """Whether the directory is locked instead of a file for which it has no room."""

    def __init__(
        self, directory: Path, news: News | None = None, on_taken: Callable[[], None] | None = None
    ) -> None:
        self.fleet = directory.name
        self._on_taken = on_taken
        self.news = news or News()
        self._directory = directory
        self._paths: dict[str, Path] = {}
        self.own = self.own_of_directory.setdefault(directory, set())

    def take(
        self, name: str, activity: str, *, shared: bool = False, repairs: bool = False
    ) -> Lock:
        """Take a lock for this process, now. `repairs`: see `Holder`.

        Raises:
            ConflictError: it is taken; the message names the holders.
            StateUnwritable: there is no room for the lock's file, and no directory to lock instead.
            SkyctlError: the lock's file cannot be opened or locked.
        """
        try:
            file, by_file = FileLock(self._path(name), partial(self._open, name)), True
        except StateUnwritable as error:
            if not self.directory_stands_in:
                raise
            try:
                file, by_file = self._directory_lock(), False
            except OSError:
                raise error from None
        try:
            instead = by_file and self.directory_stands_in
            free = file.take(shared=shared) and not (instead and self._directory_taken(shared))
        except BaseException:
            file.close()
            raise
        if not free:
            file.close()
            raise self.conflict(name)
        lock = Lock(self, name, file, shared, activity, repairs)
        if self._on_taken is not None:
            self._on_taken()
        return lock

    def holders(self, name: str) -> list[Holder]:
        """Every holder of this lock now, in this process or another."""
        own = [lock.holder for lock in self.own if lock.name == name]
        own.sort(key=lambda holder: holder.since)
        pids: set[int] = set()
        for place in (self._path(name), *[self._directory] * self.directory_stands_in):
            with contextlib.suppress(OSError):
                pids |= _locking_pids(place.stat()) - {os.getpid()}
        recorded = self.recorded(name) if pids else None
        return own + [
            recorded if recorded and recorded.pid == pid else _by_process(pid)
            for pid in sorted(pids)
        ]

    def recorded(self, name: str) -> Holder | None:
        """The holder recorded in the lock's file; None if there is none, or it cannot be read."""
        try:
            with self._path(name).open("rb") as file:
                return Holder(**json.loads(file.read(_MAX_RECORD_BYTES)))
        except (OSError, ValueError, TypeError):  # no room for it, or half written
            return None

    def lives(self, name: str) -> bool:
        """Whether the recorded holder still holds the lock."""
        holder = self.recorded(name)
        if holder is None:
            return False
        if holder.pid == os.getpid():
            return any(lock.name == name for lock in self.own)
        try:
            return holder.pid in _locking_pids(self._path(name).stat())
        except OSError:
            return False

    def taken(self, name: str) -> bool:
        """Whether this lock is taken exclusively."""
        return flocked(self._path(name))

    @asynccontextmanager
    async def hold(self, name: str, activity: str, *, wait_s: float) -> AsyncIterator[Lock]:
        """Hold a lock exclusively while the block runs. Raises ConflictError if it is taken for
        `wait_s` seconds. Another task of this event loop may hold it: that goes on meanwhile.
        """
        deadline, lock = time.monotonic() + wait_s, None
        while lock is None:
            try:
                lock = self.take(name, activity)
            except ConflictError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_POLL_S)
        lock.forget_dead()
        try:
            yield lock
        finally:
            lock.release()

    def _directory_lock(self) -> FileLock:
        """Stands in for a lock's file if there is no room to create it. Raises OSError."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        return FileLock(self._directory, lambda: os.open(self._directory, flags))

    def _directory_taken(self, shared: bool) -> bool:
        """Whether another process had no file to lock, and still acts."""
        with self._directory_lock() as directory:
            return not directory.take(shared=shared)

    def _path(self, name: str) -> Path:
        path = self._paths.get(name)
        if path is None:  # whoever waits asks for it many times a second
            path = self._paths[name] = self._directory / f"{name}.lock"
        return path

    def _open(self, name: str) -> int:
        path = self._path(name)
        try:
            return create_private_file(path)
        except SkyctlError:
            # a file system that became read-only: the file has existed since the fleet began
            with contextlib.suppress(OSError):
                return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            raise

    def conflict(self, name: str) -> ConflictError:
        holders = self.holders(name)
        if not holders:  # released meanwhile
            return ConflictError("another command acted on this fleet just now", hint="try again")
        first = holders[0]
        job, wait = first.wait_hint()
        stopped = next((holder for holder in holders if holder.stopped), first)
        return ConflictError(
            f"fleet {self.fleet} is busy: {' and '.join(map(str, holders))}",
            hint=stopped.hint(wait),
            details={
                **({"job": job} if job else {}),
                "holder": first.activity,
                "pid": first.pid,
                "since": first.since,
            },
        )


def _forget_inherited() -> None:
    """The locks of the process that forked this one are not this one's."""
    for locks in Locks.own_of_directory.values():
        locks.clear()


after_fork_in_child(_forget_inherited)


def stopped_hint(pid: int, fleet: str = "") -> str:
    """What to type about a process that is stopped; `fleet` if it acts for another."""
    first = f"let it go on: kill -CONT {pid}; or end it: kill -KILL {pid}; then: skyctl recover"
    return f"{first} --fleet {fleet}" if fleet else first


def _has_record(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _locking_pids(status: os.stat_result) -> set[int]:
    """The processes that have an flock on this file (proc_locks(5))."""
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = set()
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5] == inode:
            pids.add(int(words[4]))
    return pids


def _by_process(pid: int) -> Holder:
    """A holder without a record, described by its command line."""
    import psutil

    try:
        process = psutil.Process(pid)
        words = process.cmdline()
        names = [Path(words[0]).name, *words[1:]] if words else [process.name()]
        # as `skyctl` or `python -m skyctl` starts one: a full disk may have left no record
        is_command = words[1:2] == ["-m"] and words[2:3] in (["skyctl"], ["skyctl.supervisor"])
        is_command = is_command or [Path(word).name for word in words[1:2]] == ["skyctl"]
        command = " ".join(names)[:200]
        return Holder(command, pid, process.create_time(), create_time(pid) or 0.0, is_command)
    except psutil.Error:
        return Holder("another process", pid, time.time())
