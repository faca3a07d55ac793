"""Curves over the steps of a training loop as an SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, MARGIN = 640, 220, 48
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #57606a } .title { font-weight: 600; fill: #24292f }
.axis { stroke: #d0d7de } .line { fill: none; stroke: #1f6feb; stroke-width: 2 }
.dot { fill: #1f6feb } .bar { fill: #8250df }
</style>"""


@dataclass(frozen=True)
class Panel:
    """One curve; with `bars` a bar for each step."""

    title: str
    values: Sequence[float]
    bars: bool = False


def plot(*panels: Panel) -> str:
    """The panels, one below the other."""
    height = len(panels) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        STYLE,
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for place, panel in enumerate(panels):
        top = _top(panel.values)
        marks = _bars(panel.values, top) if panel.bars else _line(panel.values, top)
        parts.append(_panel(panel.title, marks, top, place * HEIGHT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _top(values: Sequence[float]) -> float:
    """A round number above every value."""
    largest = max(values, default=0.0) or 1.0
    size = 1.0
    while size < largest:
        size *= 10
    while size / 10 >= largest:
        size /= 10
    return next(size * step for step in (0.2, 0.4, 0.5, 0.8, 1.0) if size * step >= largest)


def _panel(title: str, marks: str, top: float, y: int) -> str:
    axes = []
    for share in (0.0, 0.5, 1.0):
        at = _y(share)
        axes.append(f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - 16}" y1="{at}" y2="{at}"/>')
        label = f"{share * top:,.0f}" if top >= 100 else f"{share * top:.3g}"
        axes.append(f'<text x="{MARGIN - 6}" y="{at + 4}" text-anchor="end">{label}</text>')
    heading = f'<text class="title" x="{MARGIN}" y="20">{title}</text>'
    step = f'<text x="{WIDTH - 16}" y="{HEIGHT - 4}" text-anchor="end">step</text>'
    return f'<g transform="translate(0 {y})">{heading}{"".join(axes)}{marks}{step}</g>'


def _line(values: Sequence[float], top: float) -> str:
    points = [(_x(i, len(values)), _y(value / top)) for i, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    return f'<polyline class="line" points="{path}"/>{dots}{_steps(len(values))}'


def _bars(values: Sequence[float], top: float) -> str:
    bars = []
    for i, value in enumerate(values):
        x, y = _x(i, len(values)), _y(value / top)
        bars.append(
            f'<rect class="bar" x="{x - 6:.1f}" y="{y:.1f}" width="12" '
            f'height="{_y(0.0) - y:.1f}"><title>{value:,.3g}</title></rect>'
        )
    return "".join(bars) + _steps(len(values))


def _steps(count: int) -> str:
    every = max(1, count // 12)
    return "".join(
        f'<text x="{_x(i, count):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{i}</text>'
        for i in range(0, count, every)
    )


def _x(index: int, count: int) -> float:
    inner = WIDTH - MARGIN - 56
    return MARGIN + 20 + inner * index / max(1, count - 1)


def _y(share: float) -> float:
    return 36 + (HEIGHT - 72) * (1 - share)
