"""`skyctl ls`: all fleets of this user."""

from __future__ import annotations

from dataclasses import asdict

from skyctl import output
from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import JsonOption


def ls(as_json: JsonOption = False) -> None:
    """List the fleets that this user has started or attached to, with what they do now.

    It asks the supervisors on this machine and no server.

    \b
    Examples:
      skyctl ls
      skyctl ls --json | jq -r '.data.fleets[] | select(.state != "down") | .name'
    """
    from skyctl.service.listing import list_fleets

    fleets = in_loop(list_fleets())
    grouped = any(fleet.sleep_group for fleet in fleets)
    columns = ["FLEET", "STATE", *["GROUP"] * grouped, ">SERVERS", "WEIGHTS", ">PID", "~FILE"]
    rows = [
        [
            fleet.name,
            output.styled(fleet.state),
            *[fleet.sleep_group] * grouped,
            fleet.servers,
            fleet.weight_version or ("base" if fleet.servers else None),
            fleet.supervisor_pid,
            fleet.file,
        ]
        for fleet in fleets
    ]
    output.emit(
        {"fleets": [asdict(fleet) for fleet in fleets]},
        output.table(columns, rows)
        if rows
        else "no fleet was started yet: skyctl init, then skyctl up",
    )
