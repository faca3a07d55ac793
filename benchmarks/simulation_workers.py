"""Processes that play schedules of the simulation, each schedule bounded.

a schedule loops in virtual time      its event loop ends it after so many steps (violation)
it loops without a step               SIGPROF ends it after `LIMIT_S` of processor time (violation)
it waits, or handles no signal,       the process is replaced, the seed is reported, and the
or its process dies                   seeds after it go to another process
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from tests.simulation import seams
from tests.simulation.world import Ended

MEMORY = Path("/dev/shm")
LIMIT_S = 60.0
"""Of processor time: a schedule takes 0.1 s, which a busy machine stretches a hundredfold."""
GRACE_S = 600.0
"""How much longer than that, of real time, its process may take."""
_START_S = 60.0
_RENEW = 5000


Player = Callable[[int, Path], Ended]
"""Plays one seed in a directory."""


@dataclass(frozen=True)
class Order:
    """A batch of seeds to play in one process."""

    label: str
    """Comes back with each schedule that ends."""
    play: Player
    """Is pickled."""
    seeds: Sequence[int]
    """In this order."""
    limit_s: float = LIMIT_S
    """The longest that one may take, in seconds of processor time."""


class TooLong(KeyboardInterrupt):
    """Raised where a schedule is after its limit. A task passes on no other kind of exception."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for schedules, in memory where that is possible."""
    home = tempfile.mkdtemp(prefix="skyctl-simulation-", dir=MEMORY if MEMORY.is_dir() else None)
    try:
        yield Path(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _expired(number: int, frame: FrameType | None) -> None:
    raise TooLong


def _work(connection: Any, home: Path) -> None:
    """In a worker: orders come in, schedules that have ended go out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the first one acts
    signal.signal(signal.SIGPROF, _expired)
    with seams.installed(), contextlib.suppress(EOFError):
        while True:
            order: Order = connection.recv()
            for seed in order.seeds:
                connection.send(_bounded(order, seed, home))


def _bounded(order: Order, seed: int, home: Path) -> Ended:
    """Play one seed; what it raises is a violation of its own."""
    try:
        # again every second: what handles a BaseException once goes on
        signal.setitimer(signal.ITIMER_PROF, order.limit_s, 1.0)
        try:
            return order.play(seed, home)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except TooLong as error:
        last = traceback.extract_tb(error.__traceback__)[-2]  # the handler is after it
        place = f"{Path(last.filename).name}, {last.name}"
        return Ended(seed, [f"hangs: it takes longer than {order.limit_s:g} s ({place})"], 0, 0, ())
    except Exception as error:
        return Ended(seed, [f"runner: {error!r}"], 0, 0, ())


class _Worker:
    """A process that plays orders, one at a time."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._stack = contextlib.ExitStack()
        home = self._stack.enter_context(scratch())
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, home), daemon=True)
        self._process.start()
        theirs.close()
        self.order: Order | None = None
        """What it has not played yet; None: nothing."""
        self._since = 0.0
        self.played = 0

    def give(self, order: Order) -> None:
        self.order, self._since = order, time.monotonic()
        with contextlib.suppress(OSError):  # it has died, as the next `receive` notices
            self.connection.send(order)

    def receive(self) -> Ended | None:
        """What it sent; None: it has died."""
        assert self.order is not None
        try:
            ended: Ended = self.connection.recv()
        except (EOFError, OSError):
            return None
        seeds = self.order.seeds[1:]
        self.order = replace(self.order, seeds=seeds) if seeds else None
        self._since = time.monotonic()
        self.played += 1
        return ended

    @property
    def hangs(self) -> bool:
        """Whether the signal that ends a schedule did not."""
        assert self.order is not None
        limit_s = self.order.limit_s + GRACE_S + (0.0 if self.played else _START_S)
        return time.monotonic() - self._since > limit_s

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._stack.close()


def play_all(
    orders: Iterator[Order], processes: int, until: float = float("inf")
) -> Iterator[tuple[str, Ended]]:
    """Every schedule as it ends, with its order's label. No order is given out after `until`, by
    the monotonic clock."""
    workers = [_Worker() for _ in range(processes)]
    again: list[Order] = []
    try:
        while True:
            for place, worker in enumerate(workers):
                if worker.order is not None:
                    continue
                if worker.played >= _RENEW:  # what it has gathered goes with it
                    worker.end()
                    worker = workers[place] = _Worker()
                over = time.monotonic() > until
                if order := None if over else again.pop() if again else next(orders, None):
                    worker.give(order)
            busy = {worker.connection: worker for worker in workers if worker.order is not None}
            if not busy:
                return
            ready = multiprocessing.connection.wait(list(busy), timeout=1.0)
            for connection, worker in busy.items():
                order = worker.order
                assert order is not None
                if connection in ready:
                    ended, reason = worker.receive(), "dies: the process that played it ended"
                elif worker.hangs:
                    ended, reason = None, f"hangs: {order.limit_s + GRACE_S:g} s, without a signal"
                else:
                    continue
                if ended is None:
                    seed, *seeds = order.seeds
                    ended = Ended(seed, [reason], 0, 0, ())
                    again += [replace(order, seeds=seeds)] if seeds else []
                    worker.end()
                    workers[workers.index(worker)] = _Worker()
                yield order.label, ended
    finally:
        for worker in workers:
            worker.end()
