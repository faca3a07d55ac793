"""Where the product asks the time, opens its state, calls servers and starts processes.

`installed()` puts the simulated ones in their place while its block runs; `enter(world)` says whose.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from skyctl.store.identity import ProcessIdentity
from skyctl.store.paths import FleetPaths
from tests.simulation.kernel import current
from tests.simulation.network import SimTransport
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
    if world is not None:
        SimTransport.network = world.network
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
        world.guard(self.process, pusher, released)

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


SEAMS: dict[str, Any] = {
    "time.time": lambda: EPOCH + _now(),
    "time.monotonic": lambda: UPTIME + _now(),
    "time.perf_counter": lambda: UPTIME + _now(),
    "time.sleep": _sleep,
    "skyctl.store.journal.own_identity": _own_identity,
    "skyctl.store.locks.own_identity": _own_identity,
    "skyctl.store.identity.ProcessIdentity.process": _process,
    "skyctl.store.identity.ProcessIdentity.alive": _alive,
    "skyctl.store.database._open": lambda path: here().disk.open(path),
    "skyctl.store.database.private_directory": lambda path: path,
    "skyctl.store.paths.FleetPaths.prepare": lambda self: self,
    "skyctl.http.client.KeptConnections": SimTransport,
    "skyctl.transfer.sender_pool.SenderProcess": SimSender,
    "skyctl.core.guardian._spawn": _spawn_guardian,
    "skyctl.push.preflight.check_memory": lambda needed_bytes: None,
    "skyctl.kill_points._point": _Point(),
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
def installed(seams: dict[str, Any] | None = None) -> Iterator[None]:
    """Inside the block, the product runs in whatever world was entered."""
    before = []
    gc.collect()
    gc.freeze()
    # what dead processes left open is unwound between schedules, into closed files
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    for name, simulated in (SEAMS if seams is None else seams).items():
        holder, attribute = _place(name)
        before.append((holder, attribute, getattr(holder, attribute)))
        setattr(holder, attribute, simulated)
    try:
        yield
    finally:
        for holder, attribute, real in reversed(before):
            setattr(holder, attribute, real)
        sys.unraisablehook = hook
        gc.unfreeze()
        gc.enable()
        if seams is None:
            enter(None)

