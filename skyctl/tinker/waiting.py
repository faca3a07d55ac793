"""Long polls: waiters for a request, or for any of an owner's, are woken when it is done."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Doorbell:
    """For one event loop. Check first, then wait, then check again: a ring is not stored."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def ring(self, *names: str) -> None:
        """Wake the waiters for these names."""
        for name in names:
            for event in self._waiting.get(name, ()):
                event.set()

    def listen(self, name: str) -> Listening:
        """Receive every ring from now on; use as a context manager."""
        return Listening(self._waiting, name)


class Listening:
    """One waiter; made by `Doorbell.listen`."""

    def __init__(self, waiting: defaultdict[str, set[asyncio.Event]], name: str) -> None:
        self._all, self._name = waiting, name
        self._event = asyncio.Event()

    def __enter__(self) -> Listening:
        self._all[self._name].add(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        found = self._all[self._name]
        found.discard(self._event)
        if not found:
            del self._all[self._name]

    async def wait(self, timeout_s: float) -> bool:
        """False if nobody rang for `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True
