"""Renders a fleet's pushes as bars: how long servers were frozen, and the transfer rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl import output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from skyctl.store.journal import PushRecord

_WIDTH = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def history_plot(pushes: Sequence[PushRecord]) -> RenderableType:
    """Oldest first, successful ones only: the others moved no weights to speak of."""
    moved = [push for push in reversed(pushes) if push.ok and push.result.get("seconds")]
    frozen = _numbers(moved, "freeze_window_s")
    rates = _numbers(moved, "gb_per_s")
    # one unit for each column: bars and figures say the same
    windows = _told(frozen, 1000.0, "ms") if max(frozen, default=0) < 2 else _told(frozen, 1.0, "s")
    speeds = _told(rates, 1000.0, "MB/s") if max(rates, default=0) < 1 else _told(rates, 1, "GB/s")
    rows = [
        [
            push.job,
            push.version,
            _bar(window, max(frozen), "blue"),
            said,
            _bar(rate, max(rates), "green"),
            speed,
        ]
        for push, window, said, rate, speed in zip(
            moved, frozen, windows, rates, speeds, strict=True
        )
    ]
    return output.table(["PUSH", "VERSION", "FROZEN", ">", "RATE", ">"], rows)


def _numbers(pushes: Sequence[PushRecord], key: str) -> list[float]:
    return [float(push.result.get(key) or 0.0) for push in pushes]


def _told(values: Sequence[float], factor: float, unit: str) -> list[str]:
    """The values in one unit, with as many decimals as the largest needs for three figures."""
    largest = max(values, default=0.0) * factor
    decimals = 0 if largest >= 100 else 1 if largest >= 10 else 2
    return [f"{value * factor:.{decimals}f} {unit}" for value in values]


def _bar(value: float, most: float, colour: str) -> RenderableType:
    """Up to _WIDTH cells, to an eighth of a cell."""
    eighths = round(value / most * _WIDTH * 8) if most else 0
    whole, rest = divmod(eighths, 8)
    cells = (_EIGHTHS[8] * whole + (_EIGHTHS[rest] if rest else "")).ljust(_WIDTH)
    return output.text(cells, [(0, _WIDTH, colour)])
