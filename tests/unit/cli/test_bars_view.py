"""How a push looks over time: bars that meet without overlapping, one unit, signs that differ."""

from __future__ import annotations

import io
from itertools import pairwise

from rich.console import Console, RenderableType

from skyctl.cli.bars_view import history_plot, legend, timeline_view
from skyctl.core.timeline import ServerTimeline, Span, Timeline
from skyctl.store.journal import PushRecord

COLUMNS = 100


def shown(view: RenderableType) -> list[str]:
    """The lines a terminal shows, as wide as they are."""
    file = io.StringIO()
    Console(file=file, width=COLUMNS, color_system=None).print(view, soft_wrap=True)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def push(total_s: float = 1.0) -> Timeline:
    """Four stages, one of them short, and two servers frozen from 40 % to 90 %."""
    stages = [("preflight", 0, 0.304), ("pause", 0.304, 0.306), ("update", 0.306, 0.9)]
    states = (
        Span("pausing", 0.31 * total_s, 0.4 * total_s),
        Span("paused", 0.4 * total_s, 0.5 * total_s),
        Span("updating", 0.5 * total_s, 0.7 * total_s),
        Span("updated", 0.7 * total_s, 0.9 * total_s),
    )
    return Timeline(
        total_s,
        tuple(Span(n, b * total_s, e * total_s) for n, b, e in [*stages, ("resume", 0.9, 1.0)]),
        (
            ServerTimeline("demo-0", states, 0.5 * total_s),
            ServerTimeline("demo-1", (*states, Span("quarantined", 0.9 * total_s, total_s)), 0.6),
        ),
    )


def halves(line: str) -> tuple[int, int]:
    """Where a bar begins and ends, in half cells."""
    bar = [at for at, cell in enumerate(line) if cell in "█▌▐"]
    return 2 * bar[0] + (line[bar[0]] == "▐"), 2 * bar[-1] + 2 - (line[bar[-1]] == "▌")


def test_a_stage_begins_where_the_one_before_it_ended() -> None:
    lines = shown(timeline_view(push(), columns=COLUMNS))
    bars = [halves(line) for line in lines if "█" in line][:3]
    assert len(bars) == 3
    for (_, ended), (began, _) in pairwise(bars):
        assert began == ended


def test_the_marks_of_the_axis_are_round_and_begin_at_their_time() -> None:
    axis, preflight, *_ = shown(timeline_view(push(10.0), columns=COLUMNS))
    assert axis.split() == ["0", "2", "s", "4", "s", "6", "s", "8", "s"]
    origin, width = preflight.index("█"), COLUMNS - 34
    assert axis.index("4 s") == origin + round(0.4 * width)


def test_a_stage_shorter_than_a_cell_is_a_thin_line_where_it_began() -> None:
    lines = shown(timeline_view(push(), columns=COLUMNS))
    preflight = next(line for line in lines if line.startswith("preflight"))
    pause = next(line for line in lines if line.startswith("pause"))
    assert "█" not in pause and pause.index("▏") == preflight.rindex("█") + 1


def test_all_times_of_a_picture_have_one_unit() -> None:
    for total_s, unit in ((0.8, "ms"), (1.9, "ms"), (7.0, "s"), (300.0, "min")):
        lines = shown(timeline_view(push(total_s), columns=COLUMNS))
        words = {word for line in lines for word in line.split() if word in ("ms", "s", "min")}
        assert words == {unit}


def test_the_states_of_a_server_are_distinct_without_colours() -> None:
    lines = shown(timeline_view(push(), columns=COLUMNS))
    first, second = lines[-2:]
    assert "░" in first and first.index("░") < first.index("▒") < first.index("▓")
    assert first.rindex("▓") < first.rindex("▒") < second.index("█")
    assert "█" not in first
    assert shown(legend(push())) == [
        "░ is being paused   ▒ frozen   ▓ frozen, being updated   █ quarantined"
    ]


def test_every_line_fits_into_the_terminal() -> None:
    for columns in (70, 100, 200):
        assert max(map(len, shown(timeline_view(push(), columns=columns)))) <= columns


def record(number: int, frozen_s: float, rate: float, *, ok: bool = True) -> PushRecord:
    result = {"seconds": 1.0, "freeze_window_s": frozen_s, "gb_per_s": rate}
    return PushRecord(f"push-{number}", 0.0, ok, f"step-{number}", "ckpt", None, result)


def test_the_history_has_one_unit_for_each_of_its_two_columns() -> None:
    newest_first = [record(3, 0.09, 0.004), record(2, 1.4, 0.002, ok=False), record(1, 0.2, 0.02)]
    lines = shown(history_plot(newest_first))
    assert [line.split()[0] for line in lines[1:]] == ["push-1", "push-3"]
    assert [" ms" in line and " MB/s" in line for line in lines[1:]] == [True, True]
    assert lines[1].count("█") > lines[2].count("█")
