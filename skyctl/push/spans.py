"""What one server did with its time while it was frozen: loading, waiting for bytes, the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Spans:
    """Moments of one server's push, in seconds of `clock`. Calls that load may overlap."""

    clock: Callable[[], float] = time.perf_counter
    frozen_at: float | None = None
    thawed_at: float | None = None
    _loads: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around a call in which the server takes and loads tensors."""
        began = self.clock()
        try:
            yield
        finally:
            self._loads.append((began, self.clock()))

    @property
    def load_s(self) -> float:
        """Seconds in which at least one such call was under way."""
        total, reached = 0.0, float("-inf")
        for began, ended in sorted(self._loads):
            total += max(0.0, ended - max(began, reached))
            reached = max(reached, ended)
        return total

    @property
    def wait_s(self) -> float:
        """Seconds between the first call and the last in which none was: the server waited for the
        sender, or for the slowest server."""
        if not self._loads:
            return 0.0
        first = min(began for began, _ in self._loads)
        last = max(ended for _, ended in self._loads)
        return last - first - self.load_s

    @property
    def freeze_s(self) -> float | None:
        """From its own answer to the pause to its own answer to the resume; None without both."""
        if self.frozen_at is None or self.thawed_at is None:
            return None
        return self.thawed_at - self.frozen_at
