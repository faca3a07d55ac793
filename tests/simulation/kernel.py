"""Simulated processes: spawned, killed at any instant, found by their identity."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from skyctl.store.identity import ProcessIdentity
from tests.simulation.loop import PROCESS, Killed, VirtualLoop

BOOT = "the-simulated-boot"
TRAINER = ".trainer"
"""The file that an open trainer has locked."""


class Process:
    """`label` says what it is; `code` is None while it lives and after a kill."""

    def __init__(self, kernel: Kernel, pid: int, label: str, parent: Process | None) -> None:
        self.kernel = kernel
        self.pid = pid
        self.label = label
        self.parent = parent
        self.identity = ProcessIdentity(pid, kernel.loop.now, BOOT)
        self.dead = False
        self.died_at = math.inf
        self.stopped = False
        self.stopped_at, self.continued_at = math.inf, -math.inf
        self.parked: list[Any] = []  # what it will do when it is continued
        self.code: int | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.descriptors: set[int] = set()
        self.own_locks: dict[Any, set[Any]] = {}
        self.dies_with_parent = False
        self.doomed: dict[str, Any] = {}
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.on_death: list[Callable[[], None]] = []
        self.on_stop: list[Callable[[], None]] = []
        self.result: Any = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"{self.label}[{self.pid}]"

    def interrupt(self) -> None:
        """Ctrl-C: what asyncio.run does."""
        if not self.dead and self.tasks:
            self.kernel.tell(f"{self}: Ctrl-C")
            self.tasks[0].cancel()

    async def gone(self, *, within_s: float) -> None:
        """Until it is dead, noticed by somebody who looks this often."""
        if self.dead:
            return
        loop = self.kernel.loop
        began, died = loop.now, asyncio.Event()
        self.on_death.append(died.set)
        await died.wait()
        await asyncio.sleep(within_s - (loop.now - began) % within_s)


@dataclass(eq=False)
class Flock:
    """A lock on a file. Forked children share it with the process that took it, and outlive it."""

    inode: int
    process: Process
    shared: bool


class Kernel:
    """Knows every process. Deaths close descriptors, which gives back their locks."""

    def __init__(self, loop: VirtualLoop, dice: Random, tell: Callable[[str], None]) -> None:
        self.loop = loop
        self.processes: dict[int, Process] = {}
        self.flocks: dict[int, Flock] = {}  # by descriptor
        self.tell = tell
        self._dice = dice
        self._next = 100

    def spawn(
        self,
        label: str,
        main: Callable[[], Coroutine[Any, Any, Any]] | None,
        *,
        parent: Process | None = None,
        dies_with_parent: bool = False,
    ) -> Process:
        """A new process that runs `main()` and then ends; without one it lives until killed."""
        self._next += 1
        process = Process(self, self._next, label, parent)
        process.dies_with_parent = dies_with_parent
        self.processes[process.pid] = process
        self.tell(f"{process} starts")
        if main is not None:

            async def run() -> None:
                try:
                    process.result = await main()
                    self._end(process, 0)
                except (Killed, KeyboardInterrupt):  # the second: this takes too long
                    raise
                except BaseException as error:
                    process.error = error
                    self._end(process, 1)

            self.loop.create_task(run(), context=process.context)
        return process

    def _end(self, process: Process, code: int) -> None:
        process.code = code
        self.kill(process, f"ends with {code}" + (f" ({process.error})" if process.error else ""))

    def kill(self, process: Process, why: str = "is killed") -> None:
        """Gone at once: no `finally` runs, what it had open is closed."""
        if process.dead:
            return
        process.dead, process.died_at = True, self.loop.now
        self.tell(f"{process} {why}")
        process.parked.clear()
        for descriptor in process.descriptors:
            self.flocks.pop(descriptor, None)
            with suppress(OSError):
                os.close(descriptor)
        process.descriptors.clear()
        for hear in process.on_death:
            hear()
        for child in list(self.processes.values()):
            if child.parent is process and child.dies_with_parent:
                self.kill(child, "dies with its parent")

    def fork(self, process: Process, dropped: Collection[int]) -> Process:
        """A child that shares what `process` has open, except what is `dropped`, and lives on."""
        child = self.spawn(f"child of {process.label}", None)
        for descriptor in process.descriptors - set(dropped):
            copy = os.dup(descriptor)
            child.descriptors.add(copy)
            if descriptor in self.flocks:
                self.flocks[copy] = self.flocks[descriptor]
        return child

    def unlock(self, descriptor: int) -> None:
        """Give a lock back, in all processes that share it."""
        flock = self.flocks.get(descriptor)
        for copy in [copy for copy, other in self.flocks.items() if other is flock]:
            del self.flocks[copy]

    def stop(self, process: Process) -> None:
        """SIGSTOP, or Ctrl-Z in its terminal."""
        if not process.dead:
            self.tell(f"{process} is stopped")
            process.stopped, process.stopped_at = True, self.loop.now
            for hear in process.on_stop:
                hear()

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        if not process.dead and process.stopped:
            self.tell(f"{process} is continued")
            process.stopped, process.continued_at = False, self.loop.now
            self.loop.run_again(process.parked)
            process.parked = []

    def die(self, why: str) -> None:
        """End the process that runs now. Does not return."""
        process = PROCESS.get()
        self.kill(process, why)
        raise Killed

    def locks(self, process: Process) -> bool:
        """Whether it keeps commands out; other trainers are told of one that is open."""
        return any(
            Path(f"/proc/self/fd/{descriptor}").readlink().name != TRAINER
            for descriptor, flock in self.flocks.items()
            if flock.process is process and not flock.shared
        )

    def is_stopped(self, pid: int) -> bool:
        return self.alive(pid) and self.processes[pid].stopped

    def end_stopped(self, pid: int) -> bool:
        """SIGKILL, if it is stopped; whether it was."""
        if not self.is_stopped(pid):
            return False
        self.kill(self.processes[pid], "is stopped, and killed for it")
        return True

    def find(self, identity: ProcessIdentity) -> Process | None:
        """The live process that this identity means."""
        found = self.processes.get(identity.pid)
        return None if found is None or found.dead or found.identity != identity else found

    def alive(self, pid: int) -> bool:
        found = self.processes.get(pid)
        return found is not None and not found.dead

    def forget(self) -> None:
        """Forget every process, with what it left unfinished."""
        for process in self.processes.values():
            process.tasks.clear()
            process.on_death.clear()
        self.processes.clear()


def current() -> Process | None:
    """The process that runs; raises Killed inside one that is dead by now."""
    process: Process | None = PROCESS.get()
    if process is not None and process.dead:
        raise Killed
    return process
