"""`skyctl recover`: find what a dead push, server or supervisor left, and repair it."""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption


def recover(
    file: FileOption = None,
    fleet: FleetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what is wrong and what would be done.")
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
    from skyctl import output
    from skyctl.cli.asking import ask
    from skyctl.cli.recover_view import failure, findings_table, recovered_table
    from skyctl.core.registry import find
    from skyctl.core.service import Recover
    from skyctl.errors import UsageError

    ref = find(file, fleet)
    findings = ask(ref, lambda running: running.findings())
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
    recovered = ask(ref, lambda running: running.recover(Recover(timeout)))
    data["recovered"] = [one.to_json() for one in recovered]
    output.emit({**data, "dry_run": False}, recovered_table(recovered), error=failure(recovered))
