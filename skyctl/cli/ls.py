"""`skyctl ls`: all fleets of this user."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import JsonOption

ElsewhereOption = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        envvar="SKYCTL_FLEET",
        show_envvar=False,
        metavar="URL",
        help="List a fleet of another machine as well (default: $SKYCTL_FLEET, if it is a URL).",
    ),
]


def ls(fleet: ElsewhereOption = None, as_json: JsonOption = False) -> None:
    """List the fleets that this user has started or attached to, with what they do now.

    It asks supervisors and no server.

    \b
    Examples:
      skyctl ls
      skyctl --token-file demo.token --ca demo.pem ls --fleet https://gpu7:7420
      skyctl ls --json | jq -r '.data.fleets[] | select(.state != "down") | .name'
    """
    from skyctl.core.registry import elsewhere, is_url
    from skyctl.service.listing import list_fleets

    fleets = in_loop(list_fleets(elsewhere(fleet) if is_url(fleet) else None))
    grouped = any(line.sleep_group for line in fleets)
    columns = ["FLEET", "STATE", *["GROUP"] * grouped, ">SERVERS", "WEIGHTS", ">PID", "~FROM"]
    rows = [
        [
            line.name,
            output.styled(line.state),
            *[line.sleep_group] * grouped,
            line.servers,
            line.weight_version or ("base" if line.servers else None),
            line.supervisor_pid,
            line.url or line.file,
        ]
        for line in fleets
    ]
    output.emit(
        {"fleets": [asdict(line) for line in fleets]},
        output.table(columns, rows)
        if rows
        else "no fleet was started yet: skyctl init, then skyctl up",
    )
    for line in fleets:
        if line.reason:
            output.note(f"{line.name}: {line.reason}")
