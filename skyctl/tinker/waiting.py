"""Long polls: waiters for a request, or for any of an owner's, are woken when it is done."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Doorbell:
    """For one event loop. Check first, then wait, then check again: a ring is not stored."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[Listening]] = defaultdict(set)

    def ring(self, *names: str) -> None:
        """Wake the waiters for these names."""
        for name in names:
            for event in self._waiting.get(name, ()):
                event.set()

    @contextmanager
    def listen(self, name: str) -> Iterator[Listening]:
        """Inside, receive every ring."""
        waiting, listening = self._waiting[name], Listening()
        waiting.add(listening)
        try:
            yield listening
        finally:
            waiting.discard(listening)
            if not waiting:
                del self._waiting[name]


class Listening(asyncio.Event):
    """One waiter; made by `Doorbell.listen`."""

    async def rung(self, timeout_s: float) -> bool:
        """False if nobody rang for `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            return False
        self.clear()
        return True
