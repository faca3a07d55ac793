"""`skyctl logs`: the logs of a fleet's processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.fleet_calls import call_chosen_fleet
from skyctl.cli.options import LINES, FileOption, FleetOption, JsonOption, SinceOption, moment
from skyctl.core.registry import Files, is_url, select, select_paths
from skyctl.core.requests import ALL_LINES, LogQuery
from skyctl.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from skyctl.store.paths import FleetPaths

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan")
_POLL_S = 0.25


NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SERVER",
        help="Servers, `router`, `tinker` or `supervisor` (default: all).",
        autocompletion=complete.processes,
    ),
]
FollowOption = Annotated[bool, typer.Option("-F", "--follow", help="Follow until Ctrl-C.")]
LinesOption = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--lines",
        min=0,
        help="Last lines of each log (default: 50, or --since, --until).",
        rich_help_panel=LINES,
    ),
]
ProbesOption = Annotated[
    bool,
    typer.Option(
        "--probes", help="Also the access-log lines of health probes.", rich_help_panel=LINES
    ),
]


def logs(
    names: NamesArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    follow: FollowOption = False,
    lines: LinesOption = None,
    since: SinceOption = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Up to then.", rich_help_panel=LINES)
    ] = None,
    probes: ProbesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the end of the logs, each line behind its replica's name.

    A line `── skyctl starts …` stands where each run of a process begins, also with --since.

    \b
    Examples:
      skyctl logs
      skyctl logs tiny-1 -n 200
      skyctl logs --since 1h --until 30m
      skyctl logs --follow router
    """
    names = names or []
    absent = next((path for path in file or () if not path.exists()), Path("-"))
    if absent != Path("-"):  # `-f` follows in other tools
        raise UsageError(
            f"there is no fleet file {absent}",
            hint=f"-f names the fleet file; to follow: skyctl logs --follow {absent}",
        )
    if follow and as_json:
        raise UsageError("--follow and --json do not go together")
    remote = is_url(fleet)
    if remote and follow:
        raise UsageError("--follow works on the fleet's own machine")
    if follow and until:
        raise UsageError("--follow and --until do not go together")
    query = LogQuery(
        tuple(names),
        lines if lines is not None else ALL_LINES if since or until else 50,
        probes,
        moment("--since", since) or 0.0,
        moment("--until", until),
    )
    if follow:
        with contextlib.suppress(KeyboardInterrupt):  # the usual way out
            follow_logs(_paths(file, fleet), query)
        return
    endings = (_remote_endings if remote else _local_endings)(file, fleet, query)
    printer = LinePrinter(list(endings))
    if not as_json:
        for name, ending in endings.items():
            for line in ending:
                printer.print(name, line)
    output.emit({"logs": endings})


def _remote_endings(file: Files, fleet: str | None, query: LogQuery) -> dict[str, list[str]]:
    """The ends of the logs, from the fleet's supervisor."""
    endings = call_chosen_fleet(None, fleet, lambda running: running.logs(query))
    return {name: list(ending) for name, ending in endings.items()}


def _local_endings(file: Files, fleet: str | None, query: LogQuery) -> dict[str, list[str]]:
    """The ends of the logs, from this machine's files."""
    from skyctl.core.log_times import log_lines

    files = _files(_paths(file, fleet), query.names)
    return {name: log_lines(path, query) for name, path in files.items()}


def _paths(file: Files, fleet: str | None) -> FleetPaths:
    """Where the chosen fleet's logs are. Raises for an attached fleet that has none."""
    from skyctl.service.bring_up import refuse_attached

    paths = select_paths(file, fleet)
    if not any(paths.logs.glob("*.log")):
        refuse_attached(select(file, fleet))
    return paths


def follow_logs(paths: FleetPaths, query: LogQuery) -> None:
    """Print the ends of the logs and then every new line; never returns (Ctrl-C)."""
    from skyctl.core.log_times import log_lines

    files = _files(paths, query.names)
    printer = LinePrinter(list(files))
    positions: dict[str, int] = {}
    for name, path in files.items():
        positions[name] = path.stat().st_size
        for line in log_lines(path, query):
            printer.print(name, line)
    while True:
        time.sleep(_POLL_S)
        # a replica that was scaled up gets a log later
        for name, path in (files if query.names else _files(paths, ())).items():
            position = positions.get(name, 0)
            positions[name] = _print_new(printer, name, path, position, query.probes)


class LinePrinter:
    """Prints log lines behind a name in its own colour."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def print(self, name: str, line: str) -> None:
        from skyctl.engines.logs import is_mark

        if name not in self._names:
            self._names.append(name)
        width = max(map(len, self._names))
        color = _COLORS[self._names.index(name) % len(_COLORS)]
        style = "bold" if is_mark(line) else ""
        output.out.print(Text.assemble((f"{name:<{width}} │ ", color), (line, style)))


def _print_new(printer: LinePrinter, name: str, path: Path, position: int, probes: bool) -> int:
    """Print whole lines written since `position`; returns the position after them."""
    from skyctl.engines.logs import is_probe, plain
    from skyctl.launch.local.rotation import earlier

    try:
        if position > path.stat().st_size:  # it was rotated: the copy has what came before
            copy = earlier(path)
            if copy.exists() and copy.stat().st_size >= position:
                _print_new(printer, name, copy, position, probes)
            position = 0
        with path.open("rb") as log:
            log.seek(position)
            data = log.read()
    except OSError:
        return position
    whole, newline, _ = data.rpartition(b"\n")
    for line in whole.decode(errors="replace").split("\n") if newline else ():
        if probes or not is_probe(line):
            printer.print(name, plain(line))
    return position + len(whole) + len(newline)


def _files(paths: FleetPaths, names: Sequence[str]) -> dict[str, Path]:
    """Like `log_files`, but raises NotFoundError as well if the fleet has no logs at all."""
    from skyctl.core.log_times import log_files

    if not log_files(paths):
        raise NotFoundError(f"fleet {paths.name} has no logs yet", hint="start it: skyctl up")
    return log_files(paths, names)
