"""Rates from two samples of a counter."""

from __future__ import annotations


class RateMeter:
    """Rates of named counters. `at` is seconds on a clock that never goes back."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def per_second(self, name: str, value: float | None, at: float) -> float | None:
        """Growth per second since the last look; None at the first look and after a restart.

        A counter that went down belongs to a new process: that look is a first one again.
        """
        delta = self._take(name, value, at)
        return None if delta is None else delta[0] / delta[1]

    def ratio(self, name: str, part: float | None, whole: float | None, at: float) -> float | None:
        """Growth of `part` over the growth of `whole`; None while `whole` does not grow."""
        part_delta = self._take(f"{name} part", part, at)
        whole_delta = self._take(f"{name} whole", whole, at)
        if part_delta is None or whole_delta is None or whole_delta[0] <= 0:
            return None
        return part_delta[0] / whole_delta[0]

    def _take(self, name: str, value: float | None, at: float) -> tuple[float, float] | None:
        """(growth, seconds) since the last look at this counter."""
        if value is None:
            self._seen.pop(name, None)
            return None
        before = self._seen.get(name)
        self._seen[name] = (value, at)
        if before is None or value < before[0] or at <= before[1]:
            return None
        return value - before[0], at - before[1]
