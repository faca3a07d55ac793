"""Renders pushes as bars: one push over time, with the freeze of each server, and a fleet's history
of freeze windows and transfer rates.

All bars over time are rounded the same way, so a stage begins where the previous one ended. A stage
too short to see is a thin line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl import output
from skyctl.core.timeline import ServerTimeline, Span, Timeline
from skyctl.states import PushState

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from skyctl.store.journal import PushRecord

_LEAST, _MOST = 24, 72
_MOST_MARKS = 5
_NAMES_AND_TIMES = 34
_THIN = "▏"
_HALVES = {(True, True): "█", (True, False): "▌", (False, True): "▐"}
_WIDTH = 20
_ROUND_NUMBERS = [float(f"{digit}e{power}") for power in range(-3, 7) for digit in (1, 2, 5)]
_EIGHTHS = " ▏▎▍▌▋▊▉█"

# sign and colour of a server's states: they are distinct without colours, too
_PAUSING = ("░", "bright_black", "is being paused")
_FROZEN = ("▒", "blue", "frozen")
_UPDATING = ("▓", "yellow", "frozen, being updated")
_QUARANTINED = ("█", "red", "quarantined")
_ORDER = [_PAUSING, _FROZEN, _UPDATING, _QUARANTINED]
_SIGNS = {
    PushState.PAUSING: _PAUSING,
    PushState.UPDATING: _UPDATING,
    PushState.QUARANTINED: _QUARANTINED,
}


def timeline_view(drawn: Timeline, *, columns: int) -> RenderableType:
    """Fits into `columns` of the terminal, if that is more than about 60."""
    width = max(_LEAST, min(_MOST, columns - _NAMES_AND_TIMES))
    rows = [["", _axis(drawn, width), ""]]
    rows += [
        [stage.name, _stage_bar(stage, drawn, width), _time(stage.seconds, drawn)]
        for stage in drawn.stages
    ]
    if drawn.servers:
        rows.append(["", output.text(""), ""])
    rows += [
        [server.server, _server_bar(server, drawn, width), _frozen(server, drawn)]
        for server in drawn.servers
    ]
    return output.table(["", "", ">"], rows)


def legend(drawn: Timeline) -> RenderableType:
    """What the signs of its servers mean."""
    seen = [_sign(span.name) for server in drawn.servers for span in server.states]
    line, styles = "", []
    for sign, colour, meaning in dict.fromkeys(sorted(seen, key=_ORDER.index)):
        styles.append((len(line), len(line) + 1, colour))
        line += f"{sign} {meaning}   "
    return output.text(line.rstrip(), styles)


def _sign(state: str) -> tuple[str, str, str]:
    return _SIGNS.get(PushState(state), _FROZEN)


def _unit(drawn: Timeline) -> tuple[float, str, int]:
    """One unit for all times of a picture: its number per second, its name, its decimals."""
    if drawn.seconds < 2:
        return 1000.0, "ms", 0
    if drawn.seconds < 120:
        return 1.0, "s", 1 if drawn.seconds >= 10 else 2
    return 1 / 60, "min", 1


def _time(seconds: float, drawn: Timeline) -> str:
    per_second, name, decimals = _unit(drawn)
    return f"{seconds * per_second:.{decimals}f} {name}"


def _frozen(server: ServerTimeline, drawn: Timeline) -> str:
    return "" if server.frozen_s is None else f"{_time(server.frozen_s, drawn)} frozen"


def _stage_bar(span: Span, drawn: Timeline, width: int) -> Text:
    """A bar cut at half cells."""
    begin, end = (_cell(at, drawn, width * 2) for at in (span.begin_s, span.end_s))
    if end == begin:
        first = min(begin // 2, width - 1)
        return output.text(" " * first + _THIN, [(first, first + 1, "green")])
    first, last = begin // 2, (end + 1) // 2
    cells = "".join(
        _HALVES[begin <= half < end, begin <= half + 1 < end]
        for half in range(first * 2, last * 2, 2)
    )
    return output.text(" " * first + cells, [(first, last, "green")])


def _server_bar(server: ServerTimeline, drawn: Timeline, width: int) -> Text:
    cells, styles = [" "] * width, []
    for span in server.states:
        sign, colour, _ = _sign(span.name)
        first, last = (_cell(at, drawn, width) for at in (span.begin_s, span.end_s))
        cells[first:last] = sign * (last - first)
        styles.append((first, last, colour))
    return output.text("".join(cells).rstrip(), styles)


def _cell(seconds: float, drawn: Timeline, cells: int) -> int:
    return round(seconds / drawn.seconds * cells) if drawn.seconds else 0


def _axis(drawn: Timeline, width: int) -> Text:
    """Marks at round times, each starting at the cell of its time."""
    per_second, name, _ = _unit(drawn)
    whole = drawn.seconds * per_second
    step = next((s for s in _ROUND_NUMBERS if s * _MOST_MARKS >= whole), whole)
    line, mark = "0", step
    while step and mark < whole:
        label = f"{mark:g} {name}"
        at = round(mark / whole * width)
        if at + len(label) > width:
            break
        line = line.ljust(at) + label
        mark += step
    return output.text(line, [(0, width, "bright_black")])


def history_plot(pushes: Sequence[PushRecord]) -> RenderableType:
    """Oldest first, successful pushes only: the others moved hardly any weights."""
    moved = [push for push in reversed(pushes) if push.ok and push.result.get("seconds")]
    frozen = _numbers(moved, "freeze_window_s")
    rates = _numbers(moved, "gb_per_s")
    # one unit per column, so that bars and figures agree
    windows = (
        _in_one_unit(frozen, 1000.0, "ms")
        if max(frozen, default=0) < 2
        else _in_one_unit(frozen, 1.0, "s")
    )
    speeds = (
        _in_one_unit(rates, 1000.0, "MB/s")
        if max(rates, default=0) < 1
        else _in_one_unit(rates, 1, "GB/s")
    )
    rows = [
        [
            push.job,
            push.version,
            _bar(window, max(frozen), "blue"),
            window_text,
            _bar(rate, max(rates), "green"),
            speed_text,
        ]
        for push, window, window_text, rate, speed_text in zip(
            moved, frozen, windows, rates, speeds, strict=True
        )
    ]
    return output.table(["PUSH", "VERSION", "FROZEN", ">", "RATE", ">"], rows)


def _numbers(pushes: Sequence[PushRecord], key: str) -> list[float]:
    return [float(push.result.get(key) or 0.0) for push in pushes]


def _in_one_unit(values: Sequence[float], factor: float, unit: str) -> list[str]:
    """The values in one unit, with as many decimals as the largest needs for three digits."""
    largest = max(values, default=0.0) * factor
    decimals = 0 if largest >= 100 else 1 if largest >= 10 else 2
    return [f"{value * factor:.{decimals}f} {unit}" for value in values]


def _bar(value: float, most: float, colour: str) -> RenderableType:
    """A bar of up to _WIDTH cells, to an eighth of a cell."""
    eighths = round(value / most * _WIDTH * 8) if most else 0
    whole, part = divmod(eighths, 8)
    cells = (_EIGHTHS[8] * whole + (_EIGHTHS[part] if part else "")).ljust(_WIDTH)
    return output.text(cells, [(0, _WIDTH, colour)])
