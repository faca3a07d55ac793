"""Many deadlines on one event-loop timer: a timer each would cost a tenth of a fan-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Calls `late` with each item that is not withdrawn in time, on the loop's clock.

    Belongs to the event loop it is made in.
    """

    def __init__(self, late: Callable[[T], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._late = late
        self._waiting: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def put(self, one: T, until: float) -> None:
        """Call `late` with `one` at `until`."""
        self._waiting[one] = until
        if self._timer is None or until < self._timer.when():
            self._arm(until)

    def take_back(self, one: T) -> None:
        """Withdraw `one`, whether or not its time has passed."""
        self._waiting.pop(one, None)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(at, self._look)

    def _look(self) -> None:
        """The timer's time has come, which may be that of one taken back long ago."""
        self._timer = None
        now = self.loop.time()
        for one in [one for one, until in self._waiting.items() if until <= now]:
            del self._waiting[one]
            self._late(one)
        if self._waiting:
            self._arm(min(self._waiting.values()))
