"""Tells tasks of this process that a job has ended or that a lock was released."""

from __future__ import annotations

import asyncio


class News:
    """Nothing is stored: a waiter learns of what happens from then on."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Wake all waiters. For the thread of their event loop."""
        for one in self._waiting:
            if not one.done():
                one.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Whether something happened within `timeout_s` seconds."""
        one = asyncio.get_running_loop().create_future()
        self._waiting.add(one)
        try:
            await asyncio.wait({one}, timeout=timeout_s)
            return one.done()
        finally:
            self._waiting.discard(one)
