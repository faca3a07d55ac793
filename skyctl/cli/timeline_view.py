"""A push drawn over time: a bar per stage, and for each server how long it was frozen.

Every bar is cut at the same cells, so what follows on something begins in the cell after it; what is
shorter than a cell is a thin line where it began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl import output
from skyctl.fleet.timeline import ServerTimeline, Span, Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_LEAST, _MOST = 24, 72
_TICKS = 4
_NAMES_AND_TIMES = 34
_STAGE, _THIN = "█", "▏"

# Sign and colour of a server's states: they differ without colours, too.
_PAUSING = ("░", "bright_black", "is being paused")
_FROZEN = ("▒", "blue", "frozen")
_HALF_NEW = ("▓", "yellow", "frozen, half new")
_QUARANTINED = ("█", "red", "quarantined")
_ORDER = [_PAUSING, _FROZEN, _HALF_NEW, _QUARANTINED]
_SIGNS = {"pausing": _PAUSING, "updating": _HALF_NEW, "quarantined": _QUARANTINED}


def timeline_view(drawn: Timeline, *, columns: int) -> RenderableType:
    """Fits into `columns` of the terminal, where those are more than about 60."""
    width = max(_LEAST, min(_MOST, columns - _NAMES_AND_TIMES))
    rows = [["", _axis(drawn.seconds, width), ""]]
    rows += [
        [one.name, _bar([(one, (_STAGE, "green"))], drawn, width), _time(one.seconds, drawn)]
        for one in drawn.stages
    ]
    if drawn.servers:
        rows.append(["", output.text(""), ""])
    rows += [
        [one.server, _server_bar(one, drawn, width), _frozen(one, drawn)] for one in drawn.servers
    ]
    return output.table(["", "", ">"], rows)


def legend(drawn: Timeline) -> RenderableType:
    """What the signs of its servers say."""
    seen = [_sign(span.name) for one in drawn.servers for span in one.states]
    line, styles = "", []
    for sign, colour, meaning in dict.fromkeys(sorted(seen, key=_ORDER.index)):
        styles.append((len(line), len(line) + 1, colour))
        line += f"{sign} {meaning}   "
    return output.text(line.rstrip(), styles)


def _sign(state: str) -> tuple[str, str, str]:
    return _SIGNS.get(state, _FROZEN)


def _unit(drawn: Timeline) -> tuple[float, str, int]:
    """One unit for all times of a picture: how many make a second, its name, its decimals."""
    if drawn.seconds < 2:
        return 1000.0, "ms", 0
    if drawn.seconds < 120:
        return 1.0, "s", 1 if drawn.seconds >= 10 else 2
    return 1 / 60, "min", 1


def _time(seconds: float, drawn: Timeline) -> str:
    per_second, name, decimals = _unit(drawn)
    return f"{seconds * per_second:.{decimals}f} {name}"


def _frozen(one: ServerTimeline, drawn: Timeline) -> str:
    return "" if one.frozen_s is None else f"{_time(one.frozen_s, drawn)} frozen"


def _server_bar(one: ServerTimeline, drawn: Timeline, width: int) -> Text:
    return _bar([(span, _sign(span.name)[:2]) for span in one.states], drawn, width)


def _bar(spans: list[tuple[Span, tuple[str, str]]], drawn: Timeline, width: int) -> Text:
    """Spans in order, none over another; the last cell is `width` - 1."""
    cells, styles = [" "] * width, []
    for span, (sign, colour) in spans:
        first = min(_cell(span.begin_s, drawn, width), width - 1)
        last = _cell(span.end_s, drawn, width)
        if last > first:
            cells[first:last] = sign * (last - first)
        elif cells[first] == " ":
            cells[first], last = _THIN, first + 1
        styles.append((first, last, colour))
    return output.text("".join(cells).rstrip(), styles)


def _cell(seconds: float, drawn: Timeline, width: int) -> int:
    return round(seconds / drawn.seconds * width) if drawn.seconds else 0


def _axis(seconds: float, width: int) -> Text:
    """`0`, then a mark at each quarter, right-aligned to where it is."""
    whole = Timeline(seconds, (), ())
    line = [" "] * width
    line[0] = "0"
    for tick in range(1, _TICKS + 1):
        label = _time(seconds * tick / _TICKS, whole)
        end = width * tick // _TICKS
        line[end - len(label) : end] = label
    return output.text("".join(line), [(0, width, "bright_black")])
