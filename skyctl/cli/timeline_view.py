"""A push drawn over time: a bar per stage, a bar per server, and the freeze window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl import output
from skyctl.fleet.timeline import FROZEN, ServerTimeline, Span, Timeline
from skyctl.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_LEAST, _MOST = 24, 72
_TICKS = 4
_NAMES_AND_TIMES = 34
_STAGE, _SHADE = "█", "▒"


def timeline_view(drawn: Timeline, *, columns: int) -> RenderableType:
    """Fits into `columns` of the terminal, where those are more than about 60."""
    width = max(_LEAST, min(_MOST, columns - _NAMES_AND_TIMES))
    rows = [["", _axis(drawn.seconds, width), ""]]
    rows += [
        [span.name, _stage_bar(span, drawn, width), _time(span.seconds)] for span in drawn.stages
    ]
    if drawn.servers:
        rows.append(["", output.text(""), ""])
    rows += [[one.server, _server_bar(one, drawn, width), _frozen(one)] for one in drawn.servers]
    return output.table(["", "", ">"], rows)


def legend() -> RenderableType:
    """What the colours of servers say."""
    return output.text(
        f"{_SHADE} frozen   {_SHADE} half new   {_SHADE} quarantined",
        [
            (0, 1, "blue"),
            (11, 12, "cyan"),
            (24, 25, "red"),
        ],
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else format_seconds(seconds)


def _frozen(one: ServerTimeline) -> str:
    return "" if one.frozen_s is None else f"{_time(one.frozen_s)} frozen"


def _cells(span: Span, total_s: float, width: int) -> tuple[int, int]:
    """First cell and the one after the last; something that happened is never without a cell."""
    first = min(int(span.begin_s / total_s * width), width - 1) if total_s else 0
    last = round(span.end_s / total_s * width) if total_s else 0
    return first, max(last, first + 1)


def _stage_bar(span: Span, drawn: Timeline, width: int) -> Text:
    first, last = _cells(span, drawn.seconds, width)
    return output.text(" " * first + _STAGE * (last - first), [(first, last, "green")])


def _server_bar(one: ServerTimeline, drawn: Timeline, width: int) -> Text:
    cells = [" "] * width
    styles = []
    for span in one.states:
        first, last = _cells(span, drawn.seconds, width)
        cells[first:last] = _SHADE * (last - first)
        styles.append((first, last, _colour(span.name)))
    return output.text("".join(cells)[:width].rstrip(), styles)


def _colour(state: str) -> str:
    if state == "updating":
        return "cyan"
    return "blue" if state in FROZEN else "red"


def _axis(seconds: float, width: int) -> Text:
    """`0`, then a mark at each quarter, right-aligned to where it is."""
    line = [" "] * width
    line[0] = "0"
    for tick in range(1, _TICKS + 1):
        label = _time(seconds * tick / _TICKS)
        end = width * tick // _TICKS
        line[end - len(label) : end] = label
    return output.text("".join(line), [(0, width, "bright_black")])
