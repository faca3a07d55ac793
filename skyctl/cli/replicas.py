"""`skyctl restart` and `skyctl scale`: new processes for replicas, and more or fewer of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.options import FileOption, FleetOption, JsonOption, ServersArgument
from skyctl.core.registry import find
from skyctl.core.status import OperationKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from skyctl.core.registry import FleetRef, RemoteRef
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
    from skyctl.core.requests import Restart

    ref = find(file, fleet)
    chosen = tuple(servers or ())
    title = f"restarting {', '.join(chosen) or ref.name}"
    _follow(ref, OperationKind.RESTART, title, lambda running: running.restart(Restart(chosen)))


def scale(
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of replicas.")],
    file: FileOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run N replicas. New ones take the fleet's weights before they are routed.

    To shrink, the last ones leave the router, finish their requests and stop. The next `skyctl up`
    goes back to the number in the fleet file. With `scale:` there, load goes on deciding it.

    \b
    Examples:
      skyctl scale 3
      skyctl scale 1 --fleet tiny
    """
    from skyctl.core.requests import Scale

    ref = find(file, fleet)
    title = f"scaling {ref.name} to {replicas}"
    _follow(ref, OperationKind.SCALE, title, lambda running: running.scale(Scale(replicas)))


def _follow(
    ref: FleetRef | RemoteRef,
    kind: OperationKind,
    title: str,
    begin: Callable[[FleetService], Awaitable[int]],
) -> None:
    """Begin an operation, show it until it ends, and print the status."""
    from skyctl.cli.fleet_calls import begun_and_followed, follow
    from skyctl.cli.fleet_view import status_view
    from skyctl.cli.job_view import going_on

    async def follow_begun(running: FleetService, begun: int) -> FleetStatus:
        if begun:
            return await follow(running, begun, title)
        output.note(f"{title}: nothing to do")
        return await running.status()

    done = begun_and_followed(
        ref, begin, follow_begun, lambda begun: going_on(f"{kind}-{begun}") if begun else ""
    )
    if (scaling := done.scaling) is not None and kind is OperationKind.SCALE:
        output.note(f"load decides from here: {scaling.min} to {scaling.max} replicas")
    output.emit(done.to_json(), status_view(done))
