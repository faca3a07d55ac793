"""Renders what `up` would change: the processes that start, restart and stop, and why."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from skyctl.supervisor.reconcile import ChangeKind

if TYPE_CHECKING:
    from skyctl.supervisor.reconcile import Difference, Preview, ProcessChange

_SIGNS = {
    ChangeKind.START: ("+", "green"),
    ChangeKind.RESTART: ("~", "yellow"),
    ChangeKind.STOP: ("-", "red"),
    ChangeKind.KEEP: (" ", "dim"),
}
_SECRET = "sha256:"


def change_lines(name: str, preview: Preview) -> list[Text]:
    """One line for processes that change alike, and a line per setting that differs."""
    if not preview.of_kind(ChangeKind.START, ChangeKind.RESTART, ChangeKind.STOP):
        return [Text(f"fleet {name} is up to date, nothing to do")]
    lines = [Text(f"fleet {name} would change:", "bold")]
    for (kind, differences), group in groupby(preview.processes, key=_alike):
        names = ", ".join(process.name for process in group)
        sign, style = _SIGNS[kind]
        lines.append(Text.assemble((f"  {sign} {kind:<8}", style), names))
        width = max((len(difference.setting) for difference in differences), default=0)
        lines += [_difference(difference, width) for difference in differences]
    return lines


def _alike(process: ProcessChange) -> tuple[ChangeKind, tuple[Difference, ...]]:
    return process.kind, process.differences


def _difference(difference: Difference, width: int) -> Text:
    """`--max-model-len  2048 → 4096`."""
    line = Text(f"        {difference.setting:<{width}}  ")
    before, after = (_shown(value) for value in (difference.before, difference.after))
    if difference.before is None and difference.after is None:
        return line
    return line.append(before, "red").append(" → ").append(after, "green")


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return "***" if value.startswith(_SECRET) else value or '""'
