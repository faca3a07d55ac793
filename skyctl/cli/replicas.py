"""`skyctl restart` and `skyctl scale`: new processes for replicas, and more or fewer of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.options import FileOption, FleetOption, JsonOption, ServersArgument
from skyctl.core.registry import find

if TYPE_CHECKING:
    from skyctl.core.status import FleetStatus
    from skyctl.service import FleetService


def restart(
    servers: ServersArgument = None,
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
    from skyctl.cli.fleet_calls import call_fleet, follow
    from skyctl.cli.fleet_view import status_view
    from skyctl.core.requests import Restart

    ref = find(file, fleet)
    chosen = tuple(servers or ())

    async def run(running: FleetService) -> FleetStatus:
        operation = await running.restart(Restart(chosen))
        return await follow(running, operation, f"restarting {', '.join(chosen) or ref.name}")

    done = call_fleet(ref, run)
    output.emit(done.to_json(), status_view(done))


def scale(
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of replicas.")],
    file: FileOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run N replicas. New ones take the fleet's weights before they are routed.

    To shrink, the last ones leave the router, finish their requests and stop. The next `skyctl up`
    goes back to the number in the fleet file.

    \b
    Examples:
      skyctl scale 3
      skyctl scale 1 --fleet tiny
    """
    from skyctl.cli.fleet_calls import call_fleet, follow
    from skyctl.cli.fleet_view import status_view
    from skyctl.core.requests import Scale

    ref = find(file, fleet)

    async def run(running: FleetService) -> FleetStatus:
        operation = await running.scale(Scale(replicas))
        if operation == 0:
            output.note(f"fleet {ref.name} has {replicas} replicas, nothing to do")
            return await running.status()
        return await follow(running, operation, f"scaling {ref.name} to {replicas}")

    done = call_fleet(ref, run)
    output.emit(done.to_json(), status_view(done))
