"""`skyctl status`: every replica and the router, and what is wrong with them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import call_fleet, in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import find
from skyctl.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from skyctl.core.findings import Finding
    from skyctl.core.registry import FleetRef, RemoteRef
    from skyctl.core.status import FleetStatus
    from skyctl.errors import ExitCode
    from skyctl.service import FleetService


WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Redraw until Ctrl-C.")]
IntervalOption = Annotated[float, seconds("Between redraws with --watch.", least=0.2)]
ExitCodeOption = Annotated[
    bool,
    typer.Option(
        "--exit-code",
        help="Exit with 1 when users are not served, or something is wrong or not as the "
        "fleet file says; 4 when down.",
    ),
]


def status(
    file: FileOption = None,
    fleet: FleetOption = None,
    watch: WatchOption = False,
    interval: IntervalOption = 2.0,
    exit_code: ExitCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show one row per replica and the router: state, load, weights, process.

    \b
    Examples:
      skyctl status
      skyctl status --watch
      skyctl status --exit-code || skyctl up
      skyctl status --json | jq -r '.data.replicas[].state'
    """
    from skyctl.cli.fleet_view import drift_lines, status_view
    from skyctl.service.drift import find_drift

    ref = find(file, fleet)
    if watch:
        if as_json:
            raise UsageError("--watch and --json do not go together")
        with contextlib.suppress(KeyboardInterrupt):  # the usual way out
            in_loop(_watch(ref, interval))
        return

    async def read_status(running: FleetService) -> tuple[FleetStatus, list[Finding] | None]:
        fleet_status = await running.status()
        return fleet_status, await find_drift(ref, running, fleet_status) if exit_code else None

    fleet_status, drift = call_fleet(ref, read_status)
    data = {
        **fleet_status.to_json(),
        "drift": None if drift is None else [d.as_drift() for d in drift],
    }
    output.emit(
        data,
        status_view(fleet_status),
        *drift_lines(drift or ()),
        exit_code=_code(fleet_status, drift),
    )


async def _watch(ref: FleetRef | RemoteRef, interval_s: float) -> None:
    from skyctl.cli.fleet_view import status_view
    from skyctl.service import connect

    async with connect(ref) as running:
        latest = await running.status()
        with output.live(lambda: status_view(latest)) as live:
            while True:
                if not live.drawing:
                    output.out.print(status_view(latest))
                await asyncio.sleep(interval_s)
                latest = await running.status()
                live.refresh()


def _code(status: FleetStatus, drift: list[Finding] | None) -> ExitCode:
    """`drift` None: no exit code was requested."""
    if drift is None:
        return ExitCode.OK
    return ExitCode.FAILED if drift and not status.health.exit_code else status.health.exit_code
