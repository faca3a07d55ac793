"""Everything skyctl prints: the only module that imports Rich.

Results go to stdout, progress and errors to stderr. With `--json`, stdout holds exactly one
envelope, also on failure:

    {"skyctl": 1, "command": "pause", "ok": true, "exit_code": 0, "data": {…}, "error": null}
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from skyctl.errors import ExitCode, SkyctlError
from skyctl.output_mode import discard_stdout, mode, on_mode_change
from skyctl.sanitize import sanitized
from skyctl.tables import Table

ENVELOPE_VERSION = 1

_STATES = {
    "green": "ok ready routed succeeded",
    "yellow": "starting loading restarting rolled-back",
    "cyan": "running updating",
    "blue": "paused asleep",
    "bright_black": "skipped stopped",
    "red": "degraded failed timeout unreachable dead quarantined",
}
STATE_STYLES = {state: style for style, states in _STATES.items() for state in states.split()}

# a table in a file or a pipe is not cut to a terminal's width
WIDTH_WITHOUT_TERMINAL = 200
_MOST_OUTCOMES = 64
"""The most servers of a fan-out that are listed one by one."""


class SafeConsole(Console):
    """Prints no escape sequences but Rich's own: others write the messages and log lines."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=sanitized(segment.text))

    def on_broken_pipe(self) -> None:
        """Leave an early-closing reader (`| head`) to the entry point; Rich would exit with 1."""
        raise


def _console(*, stderr: bool) -> Console:
    # :name: and [name] in a log line or a path are plain text
    console = SafeConsole(
        stderr=stderr,
        highlight=False,
        soft_wrap=True,
        no_color=not mode.color or None,
        emoji=False,
        markup=False,
    )
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console


def _as_configured() -> None:
    """Build the consoles, for the current stdout and stderr."""
    global out, err
    out, err = _console(stderr=False), _console(stderr=True)


out: Console
err: Console
_as_configured()
on_mode_change.append(_as_configured)


def styled(state: str) -> Text:
    """A state word in its colour."""
    return Text(state, style=STATE_STYLES.get(state.split()[0].lower() if state else "", ""))


def emit(
    data: dict[str, Any],
    *views: RenderableType | None,
    exit_code: ExitCode = ExitCode.OK,
    error: SkyctlError | None = None,
) -> None:
    """Print a command's result: the envelope with `--json`, else the views in order.

    A non-zero `exit_code` (or an `error`) ends the process with that code after printing.
    """
    if error is not None:
        exit_code = error.exit_code
    try:
        if mode.json:
            _print_envelope(data, exit_code, error)
        else:
            for view in views:
                if view is not None:
                    out.print(view)
            if error is not None:
                print_error(error)
        sys.stdout.flush()
    except BrokenPipeError:
        if exit_code is ExitCode.OK:
            raise
        discard_stdout()  # its reader has gone; the exit code still counts
    if exit_code is not ExitCode.OK:
        raise SystemExit(int(exit_code))


def emit_line(data: dict[str, Any], line: str, error: SkyctlError | None = None) -> None:
    """Print one of several results, and go on: with `--json` an envelope on one line."""
    if mode.json:
        exit_code = ExitCode.OK if error is None else error.exit_code
        _print_envelope(data, exit_code, error, indent=None)
    elif error is None:
        out.print(line)
    else:
        print_error(error)


def emit_error(error: SkyctlError) -> None:
    """Print an error that ended the command (no exit): one line and its hint, or the envelope."""
    if mode.json:
        _print_envelope(error.details, error.exit_code, error)
    else:
        print_error(error)


def print_error(error: SkyctlError) -> None:
    """Print `error: message`, and a `hint:` line that says what to do next, on stderr.

    A hint is never cut: its commands are copied.
    """
    err.print(_labelled("error: ", "bold red", error.message))
    if error.hint:
        err.print(Text.assemble(("hint: ", "bold"), error.hint))


def _labelled(label: str, style: str, message: str) -> Text:
    """`label: message`; on a terminal, wrapped between words and indented below the label."""
    below = " " * len(label) if err.is_terminal else ""
    cut = (wrapped(line, indent=len(label), console=err) for line in message.splitlines())
    lines = [line for part in cut for line in part]
    return Text.assemble((label, style), ("\n" + below).join(lines))


def _print_envelope(
    data: dict[str, Any],
    exit_code: ExitCode,
    error: SkyctlError | None,
    *,
    indent: int | None = 2,
) -> None:
    envelope = {
        "skyctl": ENVELOPE_VERSION,
        "command": mode.command,
        "ok": exit_code is ExitCode.OK,
        "exit_code": int(exit_code),
        "data": data,
        "error": None if error is None else error.to_json(),
    }
    sys.stdout.write(json.dumps(envelope, indent=indent, default=str) + "\n")
    sys.stdout.flush()


def raw(text: str) -> None:
    """Write `text` to stdout at once (generated text, JSON lines); not with --json.

    A file or a pipe gets it unchanged, a terminal without its escape sequences.
    """
    if not mode.json:
        sys.stdout.write(sanitized(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def note(message: str | Text) -> None:
    """One line of progress or advice on stderr; silent with --quiet and --json."""
    if not (mode.quiet or mode.json):
        err.print(message)


def warn(message: str) -> None:
    """One warning line on stderr; never silent outside --json."""
    if not mode.json:
        print_warning(message)


def print_warning(message: str) -> None:
    """The same, but with --json too (on stderr)."""
    err.print(_labelled("warning: ", "yellow", message))


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, spare: Sequence[str] = ()
) -> Table:
    """A plain table, see `Table`."""
    return Table(columns, rows, spare)


def text(line: str, styles: Sequence[tuple[int, int, str]] = ()) -> Text:
    """A line with styled character ranges (from, up to, style): (0, 3, "green")."""
    styled_line = Text(line)
    for begin, end, style in styles:
        styled_line.stylize(style, begin, end)
    return styled_line


def wrapped(line: str, *, indent: int, console: Console | None = None) -> list[str]:
    """The line wrapped between words to fit after `indent` blanks of a terminal; unchanged if
    `console` (default: stdout) is not one: a file has room, and may be searched.
    """
    console = console or out
    if not console.is_terminal:
        return [line]

    room = max(20, console.width - indent)
    return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]


def outcome_table(outcomes: Sequence[Any]) -> RenderableType:
    """One row per server of a fan-out: SERVER, RESULT, MS, DETAIL.

    Takes `Outcome`s or their JSON mappings. Of more than `_MOST_OUTCOMES`, successes without a
    detail are left out.
    """
    rows = [row if isinstance(row, dict) else row.to_json() for row in outcomes]
    shown = rows
    if len(rows) > _MOST_OUTCOMES:
        shown = [row for row in rows if row["status"] != "ok" or row["detail"]]
    cells = [
        [row["server"], styled(row["status"]), f"{row['elapsed_ms']:.0f}", row["detail"]]
        for row in shown
    ]
    listed = table(["SERVER", "RESULT", ">MS", "~DETAIL"], cells)
    if len(shown) == len(rows):
        return listed
    hidden = Text(f"{len(rows) - len(shown)} servers ok (--json lists them)")
    return Group(listed, hidden) if shown else hidden


def progress_line(done: float, total: float, text: str) -> RichTable:
    """A bar of `done` out of `total`, and `text` after it; for use in `live`."""
    line = RichTable.grid(padding=(0, 1))
    line.add_column()
    line.add_column(no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(
        total=total, completed=done, width=30, complete_style="cyan", finished_style="green"
    )
    line.add_row(bar, text)
    return line


def interactive() -> bool:
    """Whether stderr is a terminal that can be redrawn."""
    return err.is_terminal and not (mode.quiet or mode.json) and os.environ.get("TERM") != "dumb"


@contextmanager
def live(render: Callable[[], RenderableType], *, transient: bool = False) -> Iterator[LiveView]:
    """Redraw `render()` on stderr while the block runs; call `.refresh()` after each change.

    If stderr is not a terminal nothing is drawn (use `note` for plain lines there).
    """
    if not interactive():
        yield LiveView(None)
        return
    with Live(
        get_renderable=render, console=err, transient=transient, refresh_per_second=8
    ) as rich_live:
        yield LiveView(rich_live)


def fullscreen(render: Callable[[], RenderableType]) -> Live:
    """Takes over the terminal's whole screen while its block runs; draws at each `.refresh()`."""
    return Live(get_renderable=render, console=out, screen=True, auto_refresh=False, transient=True)


def can_fill_screen() -> bool:
    """Whether stdout is a terminal that can be redrawn."""
    return out.is_terminal and os.environ.get("TERM") != "dumb"


class LiveView:
    """Handle of a `live` block."""

    def __init__(self, rich_live: Live | None) -> None:
        self._live = rich_live

    @property
    def drawing(self) -> bool:
        return self._live is not None

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
