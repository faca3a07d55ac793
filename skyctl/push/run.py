"""One push under way: its request, observer, stopwatch and label, and how it reacts to a
cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from skyctl.http.client import ControlClient
from skyctl.push.canary import CanaryResult
from skyctl.push.request import CarefulObserver, PushFleet, PushRequest
from skyctl.store.expected import Learned
from skyctl.transfer.sender_pool import SenderPool

T = TypeVar("T")


class Abandoned(asyncio.CancelledError):
    """The push was cancelled, and everything it had done was undone."""


class CancelGuard:
    """Runs one transaction in a task of its own and decides what a cancellation does to it.

    Before `enter` a cancellation ends the push at once. After it, the push is told: it undoes what
    it did or, once bytes were sent, completes. A second cancellation stops it where it is.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._entered = False

    def enter(self) -> None:
        """Servers are about to be touched: from here on a cancellation is only a request."""
        self._entered = True

    async def run(self, transaction: Coroutine[Any, Any, T]) -> T:
        """The transaction's result. Raises CancelledError when it was cancelled and undone."""
        task = asyncio.ensure_future(transaction)
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.done():  # too late to undo anything: it ends as it has ended
                    return task.result()
                again, self.cancelled = self.cancelled, True
                if again or not self._entered:
                    task.cancel()


class Rotation(Protocol):
    """Controls which servers receive users' requests, for a push."""

    async def take_out(
        self, names: Collection[str], *, others_serve: bool, closed: bool = False
    ) -> None:
        """Return once the router sends these servers nothing. `closed`: they also refuse users who
        ask them directly. Raises SkyctlError, also if `others_serve` is given and no other server
        would be left.
        """

    async def rejoin(self, names: Collection[str]) -> None:
        """They may be routed to again, if their state allows it. Never raises."""


@dataclass
class Run:
    """One push under way: what was asked for, what it works with, and its stopwatch."""

    request: PushRequest
    """What is to be pushed, and how."""
    fleet: PushFleet
    """The servers, and the bounds to keep."""
    client: ControlClient
    """Calls the servers."""
    observer: CarefulObserver
    """Is told of everything as it happens."""
    clock: Callable[[], float]
    """Seconds, as a stopwatch counts them."""
    cancel_guard: CancelGuard
    """Knows whether the push was cancelled."""
    senders: SenderPool
    """Sender processes that outlive a push."""
    rotation: Rotation | None = None
    """Takes servers out of the router; None: there is none."""
    began: float = 0.0
    """When it began, by `clock`."""
    froze_at: float | None = None
    """When the first pause was sent; None: not yet."""
    thawed_at: float = 0.0
    """When the last resume was answered."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage so far."""
    notes: list[str] = field(default_factory=list)
    """Lines the operator should read."""
    canary: list[CanaryResult] = field(default_factory=list)
    """Answers to canary prompts."""
    learned: Learned = field(default_factory=Learned)
    """What was found out for later pushes."""

    @contextmanager
    def stage(self, name: str, *, announced: bool = False) -> Iterator[None]:
        """Time a stage, and tell the observer that it begins unless that was `announced`.

        Raises:
            StateUnwritable: the stage must be on record before it begins, and cannot be.
        """
        if not announced:
            self.observer.stage(name)
        began = self.clock()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self.clock() - began

    def note(self, message: str) -> None:
        self.notes.append(message)
        self.observer.note(message)
