"""Long polls: waiters for a request, or for any of an owner's, are woken when it is done."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Doorbell:
    """For one event loop. Check first, then wait, then check again: a ring is not stored."""

    def __init__(self) -> None:
        self._waiters: defaultdict[str, set[Waiter]] = defaultdict(set)

    def ring(self, *names: str) -> None:
        """Wake the waiters for these names."""
        for name in names:
            for waiter in self._waiters.get(name, ()):
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

    async def notified(self, timeout_s: float) -> bool:
        """False if nothing rang for `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            return False
        self.clear()
        return True
