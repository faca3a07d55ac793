"""`skyctl restart`: new processes for replicas, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import complete
from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.core.status import FleetStatus
    from skyctl.service import FleetService


def restart(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Replicas to restart (default: all).",
            autocompletion=complete.replicas,
        ),
    ] = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restart replicas one after the other, so that the rest keep serving.

    Each leaves the router, finishes its requests, starts again, takes the fleet's current weights,
    and joins the router again. A replica that was quarantined or given up gets a fresh start.

    \b
    Examples:
      skyctl restart
      skyctl restart tiny-1
    """
    from skyctl import output
    from skyctl.cli.asking import ask, follow
    from skyctl.cli.fleet_view import status_view
    from skyctl.core.registry import find
    from skyctl.core.service import Restart

    ref = find(file, fleet)
    chosen = tuple(names or ())

    async def run(running: FleetService) -> FleetStatus:
        operation = await running.restart(Restart(chosen))
        return await follow(running, operation, f"restarting {', '.join(chosen) or ref.name}")

    done = ask(ref, run)
    output.emit(done.to_json(), status_view(done))
