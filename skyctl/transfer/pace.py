"""Limits how fast a sender reads while servers serve beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Bytes per second over all threads of a process, until lifted; None: no limit.

    Each read reserves its time after the previous one, so a wait that ends late is made up for;
    unused time is not saved up.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._lifted = threading.Event()
        self._wait = wait or self._lifted.wait
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def take(self, nbytes: int) -> None:
        """Return when `nbytes` may be read."""
        if self._rate is None or self._lifted.is_set():
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        if begin > now:
            self._wait(begin - now)

    def lift(self) -> None:
        """Remove the limit; waiting threads go on at once."""
        self._lifted.set()
