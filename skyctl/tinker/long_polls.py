"""Long polls: waiters for a request, or for any of an owner's, are woken when it is done. While a
training request is expected, they need not look it up in the ledger: the ring brings its outcome.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from skyctl.tinker.requests import Outcome


class Doorbell:
    """For one event loop. A ring is not stored: unless it is expected, check first, then wait, then
    check again.
    """

    def __init__(self) -> None:
        self._waiters: defaultdict[str, set[Waiter]] = defaultdict(set)
        self._expected: set[str] = set()

    def expect(self, name: str) -> None:
        """This request is accepted, and will ring with its outcome."""
        self._expected.add(name)

    def expects(self, name: str) -> bool:
        """Whether it is still to ring."""
        return name in self._expected

    def ring(self, *names: str, outcome: Outcome | None = None) -> None:
        """Wake the waiters for these names, and give them the outcome."""
        for name in names:
            self._expected.discard(name)
            for waiter in self._waiters.get(name, ()):
                waiter.outcome = outcome
                waiter.set()

    @contextmanager
    def listen(self, name: str) -> Iterator[Waiter]:
        """Inside, receive every ring."""
        waiters, waiter = self._waiters[name], Waiter()
        waiters.add(waiter)
        try:
            yield waiter
        finally:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[name]


class Waiter(asyncio.Event):
    """One waiter; made by `Doorbell.listen`."""

    outcome: Outcome | None = None
    """Given by the latest ring."""

    async def notified(self, timeout_s: float) -> bool:
        """False if nothing rang for `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            return False
        self.clear()
        return True
