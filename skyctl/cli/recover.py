"""`skyctl recover`: find what a dead push, server or supervisor left, and put it right."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.core.diagnosis import Finding
    from skyctl.core.recovery import Recovered
    from skyctl.core.registry import FleetRef


def recover(
    file: FileOption = None,
    fleet: FleetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is wrong and what would be done; no more.")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", help="Stop waiting after this long; it goes on."
        ),
    ] = 900.0,
    as_json: JsonOption = False,
) -> None:
    """Look at every server and at the journal, say what is wrong, and put it right.

    What a dead push only froze is resumed. What it left half updated is scrubbed and pushed again,
    to the version that was on its way, else to the fleet's. What is stuck, dead or beyond that is
    restarted, or quarantined where skyctl did not start it. A supervisor that is gone is replaced;
    the servers go on meanwhile. Nothing that holds unknown weights is resumed.

    \b
    Examples:
      skyctl recover
      skyctl recover --dry-run
      skyctl recover --yes --json
    """
    from skyctl import output
    from skyctl.cli.recover_view import failure, findings_table, recovered_table
    from skyctl.core.registry import select
    from skyctl.errors import UsageError

    ref = select(file, fleet)
    findings = asyncio.run(_find(ref))
    wrong = [finding for finding in findings if finding.action != "nothing"]
    data = {"findings": [one.to_json() for one in findings], "recovered": []}
    if dry_run or not wrong:
        said = "nothing to do" if not wrong else f"{len(wrong)} to put right: skyctl recover"
        output.emit({**data, "dry_run": dry_run}, findings_table(findings), said)
        return
    if not yes:
        if as_json or not output.interactive():
            raise UsageError("recover asks before it acts", hint="give --yes, or --dry-run")
        output.err.print(findings_table(findings))
        typer.confirm("do this?", abort=True, err=True)
    recovered = asyncio.run(_recover(ref, timeout))
    data["recovered"] = [one.to_json() for one in recovered]
    output.emit({**data, "dry_run": False}, recovered_table(recovered), error=failure(recovered))


async def _find(ref: FleetRef) -> tuple[Finding, ...]:
    from skyctl.service.connect import connect

    async with connect(ref) as running:
        return await running.findings()


async def _recover(ref: FleetRef, timeout_s: float) -> tuple[Recovered, ...]:
    from skyctl.service.connect import connect

    async with connect(ref) as running:
        return await running.recover(timeout_s)
