"""What `validate` and `plan` share: the chosen fleet, and what a plan of it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.errors import SkyctlError, UsageError

if TYPE_CHECKING:
    from skyctl.core.registry import Files, FleetRef

FileArgument = Annotated[
    Path | None, typer.Argument(help="Fleet file; the same as -f.", metavar="FILE")
]


def chosen_fleet(argument: Path | None, file: Files, fleet: str | None) -> FleetRef:
    """The fleet named by the positional FILE, -f or --fleet.

    Raises:
        UsageError: FILE and -f name different files.
        FleetFileError: the file is missing or wrong.
        NotFoundError: nothing was named and there is no fleet file here.
    """
    from skyctl.core.registry import select

    if argument is not None and file and list(file) != [argument]:
        named = " and ".join(map(str, (argument, *file)))
        raise UsageError(
            f"the fleet file is given twice: {named}", hint="to override one: -f FILE -f FILE"
        )
    return select([argument] if argument is not None else file, fleet)


def kept(ref: FleetRef) -> tuple[dict[str, int], dict[str, str]]:
    """Ports of the fleet's live processes by name, so that they are neither moved nor reported as
    taken; and what its models mean.

    Best effort: a state that cannot be read keeps nothing.
    """
    import sqlite3

    from skyctl.cli.fleet_calls import in_loop
    from skyctl.service.supervised import SupervisedFleet

    async def call_fleet() -> tuple[dict[str, int], dict[str, str]]:
        async with SupervisedFleet(ref) as fleet:
            return await fleet.kept()

    try:
        return ({}, {}) if ref.attached else in_loop(call_fleet())
    except (SkyctlError, OSError, sqlite3.Error):
        return {}, {}
