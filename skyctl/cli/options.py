"""Options that many commands share, declared once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from skyctl.cli import complete

FileOption = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        envvar="SKYCTL_FILE",
        help="Fleet file (default: ./fleet.yaml, else the one running fleet).",
    ),
]
# for `logs`, where -f means follow, as in docker and kubectl
LongFileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        envvar="SKYCTL_FILE",
        help="Fleet file (default: ./fleet.yaml, else the one running fleet).",
    ),
]
FleetOption = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        envvar="SKYCTL_FLEET",
        help="Fleet by name, from any directory.",
        autocompletion=complete.fleets,
    ),
]
ServerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="NAME",
        help="Only this server; repeat for several (default: all).",
        autocompletion=complete.replicas,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON envelope on stdout, also on failure.")
]


def seconds(help: str, *, least: float = 0) -> Any:
    """An option that takes a time."""
    return typer.Option(min=least, metavar="SECONDS", help=help)


TimeoutOption = Annotated[
    float | None,
    seconds("Deadline of each server's call (default: the fleet file's control_timeout_s)."),
]


PauseModeOption = StrEnum("PauseModeOption", {"ABORT": "abort", "WAIT": "wait", "KEEP": "keep"})
"""What happens to running requests."""

SvgOption = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture as SVG, too.")
]
