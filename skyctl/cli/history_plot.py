"""The pushes of a fleet as bars: how long servers were frozen, and how fast bytes moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl import output
from skyctl.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from skyctl.fleet.journal import PushRecord

_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def history_plot(pushes: Sequence[PushRecord]) -> RenderableType:
    """Oldest first, successful ones only: the others moved no weights to speak of."""
    moved = [push for push in reversed(pushes) if push.ok and push.result.get("seconds")]
    frozen = [float(push.result.get("freeze_window_s") or 0.0) for push in moved]
    rates = [float(push.result.get("gb_per_s") or 0.0) for push in moved]
    rows = [
        [
            push.job,
            push.version,
            output.text(_bar(window, max(frozen)), [(0, _WIDTH, "blue")]),
            format_seconds(window),
            output.text(_bar(rate, max(rates)), [(0, _WIDTH, "green")]),
            f"{rate:.3g}",
        ]
        for push, window, rate in zip(moved, frozen, rates, strict=True)
    ]
    return output.table(["PUSH", "VERSION", "FROZEN", ">", "GB/S", ">"], rows)


def _bar(value: float, most: float) -> str:
    """Up to _WIDTH cells, to an eighth of a cell."""
    eighths = round(value / most * _WIDTH * 8) if most else 0
    whole, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * whole + (_EIGHTHS[rest] if rest else "")).ljust(_WIDTH)
