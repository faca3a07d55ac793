"""Cancelling a push: at once while nothing is touched, in an orderly way after that.

Before enter() a cancellation ends the push at once. After it the push is told, which undoes what
it did or, once bytes were sent, completes; cancelled a second time it stops where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Abandoned(asyncio.CancelledError):
    """The push was cancelled, and everything it had done was undone."""


class CancelGuard:
    """Runs one transaction in a task of its own and decides what a cancellation does to it."""

    def __init__(self) -> None:
        self.cancelled = False
        self._entered = False

    def enter(self) -> None:
        """Servers are about to be touched: from here on a cancellation is a request."""
        self._entered = True

    async def run(self, transaction: Coroutine[Any, Any, T]) -> T:
        """The transaction's result. Raises CancelledError when it was cancelled and undone."""
        task = asyncio.ensure_future(transaction)
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.done():
                    raise
                again, self.cancelled = self.cancelled, True
                if again or not self._entered:
                    task.cancel()
