"""Where the product asks the time, opens its state, calls servers and starts processes.

`installed()` puts the simulated ones in their place while its block runs; `enter(world)` says
whose.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.header import FileIdentity
from skyctl.errors import StateUnwritable
from skyctl.push.request import PushResult
from skyctl.push.run import Run
from skyctl.push.transaction import carry_out
from skyctl.store import owned
from skyctl.store.identity import ProcessIdentity
from skyctl.store.locks import Holder
from skyctl.store.paths import FleetPaths
from skyctl.store.unrecorded import LOST
from tests.simulation.kernel import Flock, current
from tests.simulation.network import PUSHING, SimTransport
from tests.simulation.sender import SimSender

if TYPE_CHECKING:
    from tests.simulation.world import World

EPOCH = 1_800_000_000.0
UPTIME = 10_000.0

_world: World | None = None


def enter(world: World | None) -> None:
    """The world that runs now."""
    global _world
    _world = world
    SimTransport.network = None if world is None else world.network
    SimSender.world = world


def here() -> World:
    assert _world is not None
    return _world


def _now() -> float:
    return 0.0 if _world is None else _world.loop.now


def _sleep(seconds: float) -> None:
    """A blocking wait: nobody else runs meanwhile, and it is later then."""
    here().loop.now += seconds


class _Point:
    """Stands in for the name of the point at which a process is to die: it is told of each."""

    def __bool__(self) -> bool:
        return True

    def __eq__(self, point: object) -> bool:
        process = current()
        if process is not None and "point" in process.doomed and process.doomed["point"] == point:
            process.doomed["passes"] -= 1
            if process.doomed["passes"] < 0:
                del process.doomed["point"]
                here().kernel.die(f"is killed at {point}")
        if process is not None and process.doomed.get("interrupt") == point:
            del process.doomed["interrupt"]
            process.interrupt()
        return False

    __hash__ = None  # type: ignore[assignment]


class Spawned:
    """What `guardian._spawn` gives: a process with a pipe that releases it."""

    def __init__(self, world: World, paths: FleetPaths) -> None:
        pusher = current()
        assert pusher is not None
        released = [False]
        self.stdin = SimpleNamespace(write=lambda data: released.__setitem__(0, True), close=_none)
        self.process = world.kernel.spawn("guardian", None)
        world.guard(self.process, pusher, released, paths.name)

    def wait(self, timeout_s: float | None = None) -> None:
        here().kernel.kill(self.process, "is released")

    def kill(self) -> None: ...


def _none() -> None: ...


def _own_identity() -> ProcessIdentity:
    process = current()
    return ProcessIdentity(1, 0.0, "outside") if process is None else process.identity


def _process(identity: ProcessIdentity) -> Any:
    return here().kernel.find(identity)


def _alive(identity: ProcessIdentity) -> bool:
    return here().kernel.find(identity) is not None


def _spawn_guardian(paths: FleetPaths) -> Spawned:
    if here().disk.full:
        raise OSError(28, "No space left on device")
    return Spawned(here(), paths)


class _Os:
    """`os`, for whoever locks files: descriptors belong to a process, and are closed with it."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        setattr(self, name, value)  # the next time it is found without a call
        return value

    def getpid(self) -> int:
        process = current()
        return 1 if process is None else process.pid

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        process = current()
        descriptor = os.open(path, flags, mode)
        if process is not None:
            process.descriptors.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        process = current()
        if process is None:  # what a dead process left is unwound: its number may be another's now
            return
        process.descriptors.discard(descriptor)
        here().kernel.flocks.pop(descriptor, None)
        os.close(descriptor)


class _Fcntl:
    """`fcntl`, which remembers whose lock it is."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(fcntl, name)
        setattr(self, name, value)
        return value

    def flock(self, descriptor: int, operation: int) -> None:
        process = current()
        if process is None:
            return
        fcntl.flock(descriptor, operation)
        if operation == fcntl.LOCK_UN:
            here().kernel.unlock(descriptor)
        else:
            shared = bool(operation & fcntl.LOCK_SH)
            inode = os.fstat(descriptor).st_ino
            here().kernel.flocks[descriptor] = Flock(inode, process, shared)


class _OwnLocks:
    """What a class attribute is to a real process."""

    def setdefault(self, directory: Path, default: set[Any]) -> set[Any]:
        process = current()
        return default if process is None else process.own_locks.setdefault(directory, default)


_OS, _FCNTL = _Os(), _Fcntl()


def _locking_pids(found: os.stat_result) -> set[int]:
    flocks = here().kernel.flocks.values()
    return {flock.process.pid for flock in flocks if flock.inode == found.st_ino}


def _by_process(pid: int) -> Holder:
    return Holder("a process", pid, EPOCH + _now(), float(pid), is_command=True)


def _stopped_supervisor(paths: FleetPaths) -> int:
    """One that starts, and has no socket yet, is not the fleet's."""
    api: Any = here().network.hosts.get(str(paths.socket))
    listening = None if api is None else api.process
    return listening.pid if listening and listening.stopped and not listening.dead else 0


def dropped_by_children() -> set[int]:
    """Descriptors that a forked process does not keep (`store/owned.py`)."""
    found = set()
    for owner in owned._owners:
        with suppress(OSError, ValueError):
            found.add(owner.fileno())
    return found


def _identity(status: os.stat_result) -> FileIdentity:
    return here().checkpoints.identity(status)


def _create_private_file(path: Path, flags: int = 0) -> int:
    if here().disk.full and not path.exists():
        raise StateUnwritable(f"cannot open {path}: No space left on device")
    return _OS.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)


async def _carry_out(run: Run) -> PushResult:
    PUSHING.set(True)
    return await carry_out(run)


_TASKS = f"asyncio.tasks.{'_all' if sys.version_info < (3, 12) else '_scheduled'}_tasks.add"
SEAMS: dict[str, Any] = {
    "time.time": lambda: EPOCH + _now(),
    "time.monotonic": lambda: UPTIME + _now(),
    "time.perf_counter": lambda: UPTIME + _now(),
    "time.sleep": _sleep,
    _TASKS: lambda task: None,  # the tasks of a loop are not asked for
    "skyctl.store.journal.own_identity": _own_identity,
    "skyctl.store.locks.os": _OS,
    "skyctl.store.owned.os": _OS,
    "skyctl.store.owned.fcntl": _FCNTL,
    "skyctl.store.locks._locking_pids": _locking_pids,
    "skyctl.store.locks._by_process": _by_process,
    "skyctl.store.locks.create_private_file": _create_private_file,
    "skyctl.store.locks.create_time": lambda pid: float(pid),
    "skyctl.store.locks.end_stopped": lambda pid, still: here().kernel.end_stopped(pid),
    "skyctl.store.locks.is_command": lambda: True,
    "skyctl.store.locks.is_stopped": lambda pid: here().kernel.is_stopped(pid),
    "skyctl.store.locks.Locks.own_of_directory": _OwnLocks(),
    "skyctl.core.arbiter.own_command": lambda: "a command",
    "skyctl.store.identity.ProcessIdentity.process": _process,
    "skyctl.store.identity.ProcessIdentity.alive": _alive,
    "skyctl.store.opening.open_file": lambda path, *_, **__: here().disk.open(path),
    "skyctl.store.opening.read_into_memory": lambda path, *_, **__: here().disk.read(path),
    "skyctl.store.database.private_directory": lambda path: path,
    "skyctl.store.database.RESERVE_BYTES": 1,
    "skyctl.store.paths.FleetPaths.prepare": lambda self: self,
    "skyctl.checkpoints.header.FileIdentity.of_status": _identity,
    # not the directory of all fleets of this user, in which others make and remove entries
    "skyctl.checkpoints.staging._memory_home": lambda _: here().home / "memory",
    "skyctl.http.client.KeptConnections": SimTransport,
    "skyctl.transfer.sender_pool.SenderProcess": SimSender,
    "skyctl.core.guardian._spawn": _spawn_guardian,
    "skyctl.push.transaction.carry_out": _carry_out,
    "skyctl.push.sender_way.check_memory": lambda needed_bytes: None,
    "skyctl.checkpoints.staging.os": _OS,
    "skyctl.checkpoints.staging.create_private_file": _create_private_file,
    "skyctl.checkpoints.live.os": _OS,
    "skyctl.api.live.create_private_file": _create_private_file,
    "skyctl.kill_points._point": _Point(),
}


_LATER = {
    "skyctl.supervisor.client.KeptConnections": SimTransport,
    "skyctl.supervisor.client.stopped_supervisor": _stopped_supervisor,
    "skyctl.service.revive.stopped_supervisor": _stopped_supervisor,
    "skyctl.service.supervised.stopped_supervisor": _stopped_supervisor,
    "skyctl.service.revive.end_stopped": lambda pid, still: here().kernel.end_stopped(pid),
    "skyctl.supervisor.client.own_command": lambda: "a command",
    "skyctl.supervisor.daemon.create_private_file": _create_private_file,
    "skyctl.supervisor.daemon.os": _OS,
    "skyctl.supervisor.replica.create_private_file": _create_private_file,
    "skyctl.supervisor.replica.os": _OS,
}


def _place(name: str) -> tuple[Any, str]:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        with suppress(ModuleNotFoundError):
            found: Any = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:-1]:
                found = getattr(found, part)
            return found, parts[-1]
    raise LookupError(name)


@contextmanager
def replaced(seams: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, these names mean these things."""
    before = []
    for name, simulated in seams.items():
        holder, attribute = _place(name)
        before.append((holder, attribute, getattr(holder, attribute)))
        setattr(holder, attribute, simulated)
    try:
        yield
    finally:
        for holder, attribute, real in reversed(before):
            setattr(holder, attribute, real)


@contextmanager
def _modules(others: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, who imports one of these modules gets another."""
    before = {name: sys.modules.pop(name, None) for name in others}
    sys.modules.update(others)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@contextmanager
def installed() -> Iterator[None]:
    """Inside the block, the product runs in whatever world was entered."""
    from tests.simulation import supervised, trainer

    logging.disable(logging.CRITICAL)
    # what dead processes left open is unwound between schedules, into closed files
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with (
            replaced({**SEAMS, **_LATER, **supervised.SEAMS, **trainer.SEAMS}),
            _modules(trainer.MODULES),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
            gc.collect()
            gc.freeze()  # what is loaded by now stays
            try:
                yield
            finally:
                enter(None)
                gc.collect()
    finally:
        LOST.clear()  # of simulated disks: the command that runs us must not warn of them
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.enable()
