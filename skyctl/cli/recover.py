"""`skyctl recover`: find what a dead push, server or supervisor left, and repair it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import find
from skyctl.errors import PartialFailure, SkyctlError, UsageError
from skyctl.units import count_of, format_seconds

if TYPE_CHECKING:
    from skyctl.core.findings import Finding
    from skyctl.core.recovery import Recovered
    from skyctl.errors import SkyctlError
    from skyctl.tables import Table

_PLANS = {
    "nothing": "",
    "resume": "check and resume",
    "sleep": "check and put to sleep again",
    "push": "scrub and push again",
    "restart": "restart",
    "quarantine": "quarantine",
    "adopt": "take over",
    "end": "end leftover processes",
    "down": "finish `skyctl down`",
    "replace": "replace, the servers go on",
    "load": "load the fleet's adapters",
}


def recover(
    file: FileOption = None,
    fleet: FleetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what is wrong and what would be done.")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    timeout: Annotated[float, seconds("Stop waiting after this long; it goes on.")] = 900.0,
    as_json: JsonOption = False,
) -> None:
    """Examine every server and the journal, report what is wrong, and repair it.

    Servers that a dead push only froze are resumed. Those it left half updated are scrubbed and
    pushed to again: the version that was on its way, else the fleet's. A server that is stuck or
    dead is restarted, or quarantined where skyctl did not start it. A supervisor that is gone is
    replaced; the servers keep running. A server with unknown weights is never resumed.

    \b
    Examples:
      skyctl recover
      skyctl recover --dry-run
      skyctl recover --yes --json
    """
    from skyctl.cli.fleet_calls import call_fleet
    from skyctl.core.findings import Condition
    from skyctl.core.requests import Recover

    ref = find(file, fleet)
    findings = call_fleet(ref, lambda running: running.findings())
    wrong = [finding for finding in findings if finding.action.needed]
    # where another fleet has to repair a server, the recovery says so, and fails
    others = any(f.condition is Condition.HALF_UPDATED and f not in wrong for f in findings)
    data = {"findings": [finding.as_diagnosis() for finding in findings], "recovered": []}
    if dry_run or not (wrong or others):
        message = "nothing to do" if not wrong else f"{len(wrong)} to repair: skyctl recover"
        output.emit({**data, "dry_run": dry_run}, _findings_table(findings), message)
        return
    if wrong and not yes:
        if not output.interactive():
            raise UsageError("recover asks before it acts", hint="give --yes, or --dry-run")
        output.err.print(_findings_table(findings))
        typer.confirm("do this?", abort=True, err=True)
    recovered = call_fleet(ref, lambda running: running.recover(Recover(timeout)))
    data["recovered"] = [repair.to_json() for repair in recovered]
    output.emit({**data, "dry_run": False}, _recovered_table(recovered), error=_failure(recovered))


def _findings_table(findings: Sequence[Finding]) -> Table:
    """SERVER, FOUND, TO DO, DETAIL."""
    rows = [
        [
            finding.server,
            output.styled(finding.condition),
            _PLANS[finding.action],
            finding.explained,
        ]
        for finding in findings
    ]
    return output.table(["SERVER", "FOUND", "TO DO", "~DETAIL"], rows)


def _recovered_table(recovered: Sequence[Recovered]) -> Table:
    """SERVER, WAS, DONE, RESULT, TIME, DETAIL."""
    rows = [
        [
            repair.server,
            output.styled(repair.condition),
            _PLANS[repair.action],
            output.styled("ok" if repair.ok else "failed"),
            format_seconds(repair.seconds),
            repair.detail,
        ]
        for repair in recovered
    ]
    return output.table(
        ["SERVER", "WAS", "DONE", "RESULT", ">TIME", "~DETAIL"], rows, spare=["TIME"]
    )


def _failure(recovered: Sequence[Recovered]) -> SkyctlError | None:
    """The error that these outcomes add up to; None if every server is as it should be."""
    failed = [repair for repair in recovered if not repair.ok]
    if not failed:
        return None
    first = failed[0]
    message = (
        f"recover: {len(failed)} of {count_of(len(recovered), 'server')} could not be repaired "
        f"({first.server}: {first.detail})"
    )
    hint = "look: skyctl status"
    if len(failed) < len(recovered):
        return PartialFailure(message, outcomes=recovered, hint=hint)
    return SkyctlError(message, hint=hint)
