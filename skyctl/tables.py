"""Tables that fit the terminal: names, states and versions stay whole, long text is folded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GAP = 2  # blanks between columns
_LEAST_FOLDED = 24  # a folded column of fewer characters cannot be read


@dataclass(frozen=True)
class Table:
    """Cells in columns; a cell is str, Text, number or None (shown as –).

    Where a terminal is too narrow, the columns of `spare` go first, from its left; then folded
    columns become narrower; then lines are longer than the terminal. Nothing is cut.
    """

    columns: Sequence[str]
    """Headings. One that starts with `>` is right-aligned, with `~` folded when space is short."""
    rows: Sequence[Sequence[Any]]
    """The cells of each row."""
    spare: Sequence[str] = ()
    """Headings of the columns that a narrow terminal does without."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = [Text(_name(column), "bold") for column in self.columns]
        rows = [[_cell(cell) for cell in row] for row in self.rows]
        widths = [max(map(_width, cells)) for cells in zip(headings, *rows, strict=True)]
        # a file or a pipe has room
        terminal = console.is_terminal or "COLUMNS" in os.environ
        shown = self._fit(widths, options.max_width) if terminal else list(range(len(widths)))
        if any(map(_name, self.columns)):
            yield from self._lines(console, headings, widths, shown)
        for row in rows:
            yield from self._lines(console, row, widths, shown)

    def _fit(self, widths: list[int], room: int) -> list[int]:
        """The columns to show; `widths` of those that are folded become what is left for them."""
        folds = [column.startswith("~") for column in self.columns]
        least = [
            min(width, _LEAST_FOLDED) if fold else width
            for width, fold in zip(widths, folds, strict=True)
        ]
        shown = list(range(len(widths)))
        for heading in self.spare:
            if _total(least, shown) > room:
                shown = [number for number in shown if _name(self.columns[number]) != heading]
        excess = max(0, _total(widths, shown) - room)
        for number in sorted(shown, key=lambda number: -widths[number]):
            fewer = min(excess, widths[number] - least[number])
            widths[number] -= fewer
            excess -= fewer
        return shown

    def _lines(
        self, console: Console, row: Sequence[Text], widths: Sequence[int], shown: Sequence[int]
    ) -> Iterator[Text]:
        parts = [
            row[number].wrap(console, widths[number], overflow="fold")
            if self.columns[number].startswith("~")
            else row[number].split("\n", allow_blank=True)
            for number in shown
        ]
        for at in range(max(map(len, parts), default=0)):
            line = Text(no_wrap=True, overflow="ignore")
            for number, part in zip(shown, parts, strict=True):
                piece = part[at] if at < len(part) else Text()
                blanks = " " * (widths[number] - piece.cell_len)
                right = self.columns[number].startswith(">")
                line.append(blanks if right else "").append_text(piece)
                line.append("" if right else blanks).append(" " * _GAP)
            line.rstrip()
            yield line


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[number] for number in shown) + _GAP * max(0, len(shown) - 1)


def _name(column: str) -> str:
    return column.lstrip(">~")


def _cell(cell: Any) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text("–" if cell is None else str(cell))


def _width(cell: Text) -> int:
    return max((line.cell_len for line in cell.split("\n", allow_blank=True)), default=0)
