"""`skyctl wait`: block until the fleet reaches a state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import complete
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.cli.verbs import ServerOption

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef, RemoteRef
    from skyctl.core.status import FleetStatus
    from skyctl.service.waiting import Condition


def wait(
    condition: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="STATE",
            help="ready, paused, awake or version=X.",
            autocompletion=complete.conditions,
        ),
    ] = "ready",
    file: FileOption = None,
    fleet: FleetOption = None,
    server: ServerOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Give up after this long.")
    ] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Wait until every replica is ready, paused, awake, or at a weight version.

    Exits with 0 once it is, with 124 when the time is over, and with 1 at once when a replica
    was given up and will not get there. Also waits for a fleet that is still down.

    \b
    Examples:
      skyctl wait
      skyctl wait --for paused --server demo-0 --timeout 10
      skyctl wait --for version=step-200 && ./evaluate.sh
    """
    from skyctl import output
    from skyctl.core.registry import find
    from skyctl.service.waiting import Condition

    wanted = Condition.parse(condition)
    began = time.perf_counter()
    status = asyncio.run(_wait(find(file, fleet), wanted, server or [], timeout))
    seconds = time.perf_counter() - began
    data = {"for": condition, "seconds": round(seconds, 3), "status": status.to_json()}
    output.emit(data, f"fleet {status.name} is {wanted} (waited {seconds:.1f} s)")


async def _wait(
    ref: FleetRef | RemoteRef, wanted: Condition, names: Sequence[str], timeout_s: float
) -> FleetStatus:
    from skyctl import output
    from skyctl.service.connect import connect
    from skyctl.service.waiting import wait_for

    said = ""

    def tell(pending: Sequence[str]) -> None:
        nonlocal said
        if said != (text := "; ".join(pending)):
            said = text
            output.note(f"waiting: {text}")

    async with connect(ref) as running:
        return await wait_for(running, wanted, timeout_s=timeout_s, names=names, on_pending=tell)
