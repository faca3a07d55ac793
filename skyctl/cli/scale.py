"""`skyctl scale`: more or fewer replicas, without touching the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.core.status import FleetStatus
    from skyctl.service import FleetService


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
    from skyctl import output
    from skyctl.cli.asking import ask
    from skyctl.cli.fleet_view import status_view
    from skyctl.core.registry import find

    ref = find(file, fleet)
    done = ask(ref, lambda running: _scale(running, ref.name, replicas))
    output.emit(done.to_json(), status_view(done))


async def _scale(running: FleetService, name: str, replicas: int) -> FleetStatus:
    from skyctl import output
    from skyctl.cli.asking import follow
    from skyctl.core.service import Scale

    operation = await running.scale(Scale(replicas))
    if operation == 0:
        output.note(f"fleet {name} has {replicas} replicas, nothing to do")
        return await running.status()
    return await follow(running, operation, f"scaling {name} to {replicas}")
