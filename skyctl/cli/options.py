"""Options that many commands share, declared once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from skyctl.cli import complete
from skyctl.errors import UsageError
from skyctl.units import parse_moment

FileOption = Annotated[
    list[Path] | None,
    typer.Option(
        "-f",
        "--file",
        envvar="SKYCTL_FILE",
        show_envvar=False,
        metavar="FILE",
        help="Fleet file, - for stdin; later ones override (default: $SKYCTL_FILE, ./fleet.yaml, "
        "else what runs).",
    ),
]
FleetOption = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        envvar="SKYCTL_FLEET",
        show_envvar=False,
        help="Fleet by name (default: $SKYCTL_FLEET).",
        autocompletion=complete.fleets,
    ),
]
ServersArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SERVER",
        help="Only these servers (default: all).",
        autocompletion=complete.replicas,
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON envelope, also on failure.")
]


LINES = "Which lines"  # a panel of --help
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="From then on: 90s, 10m, 2h or 1d ago, or an ISO 8601 time.",
        rich_help_panel=LINES,
    ),
]


def moment(option: str, text: str | None) -> float | None:
    """Seconds since the epoch. Raises UsageError for what is not a time."""
    try:
        return None if text is None else parse_moment(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def seconds(help: str, *, least: float = 0, panel: str | None = None) -> Any:
    """An option that takes a time."""
    return typer.Option(min=least, metavar="SECONDS", help=help, rich_help_panel=panel)


TimeoutOption = Annotated[
    float | None,
    seconds("Deadline per server (default: control_timeout_s of the fleet file)."),
]


PauseModeOption = StrEnum("PauseModeOption", {"ABORT": "abort", "WAIT": "wait", "KEEP": "keep"})
"""What happens to running requests."""
