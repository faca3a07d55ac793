"""`skyctl wait`: block until the fleet reaches a state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from skyctl.cli import complete
from skyctl.cli.options import FileOption, FleetOption, JsonOption, ServerOption


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
    from skyctl.cli.asking import ask_fleet
    from skyctl.service.waiting import Condition, wait_for

    wanted, said = Condition.parse(condition), ""

    def tell(pending: Sequence[str]) -> None:
        nonlocal said
        if said != (text := "; ".join(pending)):
            said = text
            output.note(f"waiting: {text}")

    began = time.perf_counter()
    status = ask_fleet(
        file,
        fleet,
        lambda running: wait_for(
            running, wanted, timeout_s=timeout, names=server or (), on_pending=tell
        ),
    )
    seconds = time.perf_counter() - began
    data = {"for": condition, "seconds": round(seconds, 3), "status": status.to_json()}
    output.emit(data, f"fleet {status.name} is {wanted} (waited {seconds:.1f} s)")
