"""`skyctl drain`: load balancers in front send nothing more."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import call_chosen_fleet
from skyctl.cli.options import FileOption, FleetOption, JsonOption

OffOption = Annotated[bool, typer.Option("--off", help="Have them send requests again.")]


def drain(
    file: FileOption = None,
    fleet: FleetOption = None,
    off: OffOption = False,
    json: JsonOption = False,
) -> None:
    """Tell load balancers in front to send nothing more; what arrives is answered as before.

    They ask `GET /ready` at the supervisor's address (`supervisor: {listen: …}`), without a token:
    200 while the fleet takes requests, else 503. It stays drained until --off, or until it is down.

    \b
    skyctl drain                # then, once they have noticed: skyctl down
    skyctl drain --off
    """
    from skyctl.core.requests import Drain

    readiness = call_chosen_fleet(file, fleet, lambda running: running.drain(Drain(not off)))
    shown = "ready" if readiness.ready else f"not ready: {readiness.reason}"
    output.emit(asdict(readiness), f"load balancers see: {shown}")
