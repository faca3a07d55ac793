"""`skyctl switch`: of fleets that share their GPUs, wake another."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.errors import UsageError

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FLEET",
        help="The fleet to wake; the same as --fleet.",
        autocompletion=complete.fleets,
    ),
]


def switch(
    name: NameArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: Annotated[
        float | None, seconds("Stop waiting for servers that start again after this long.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Of the fleets that share their GPUs, put the one that is awake to sleep, and wake this one.

    They have the same `sleep_group:` in their files. Running requests end first, for at most the
    fleet file's drain_timeout_s. All servers of the fleet wake with the weights that they had,
    those too that `skyctl sleep` put to sleep.

    \b
    Examples:
      skyctl switch judge
      skyctl switch policy --dry-run
    """
    from skyctl.cli.fleet_calls import in_loop
    from skyctl.core.registry import select
    from skyctl.service.switching import switch as switch_to

    if name and fleet and name != fleet:
        raise UsageError(f"the fleet is given twice: {name} and {fleet}")
    ref = select(file, name or fleet)
    done = in_loop(switch_to(ref, timeout_s=timeout, dry_run=dry_run, note=output.note))
    if dry_run:
        first = f"put {done.slept} to sleep, then " if done.slept else ""
        line = f"would {first}wake {done.name}"
    else:
        slept = f"; {done.slept} sleeps" if done.slept else ""
        line = f"{done.name} is awake after {done.seconds:.1f} s{slept}"
    output.emit({**asdict(done), "dry_run": dry_run}, line)
