"""`skyctl doctor`: what is wrong with the machine, the fleet file and the fleet, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.core.registry import select
from skyctl.errors import FleetFileError, NotFoundError, SkyctlError
from skyctl.output_mode import mode
from skyctl.units import count_of

if TYPE_CHECKING:
    from rich.text import Text

    from skyctl.core.registry import FleetRef
    from skyctl.doctor.check_line import CheckLine
    from skyctl.errors import FleetFileError

_TITLES = {"machine": "Machine", "fleet-file": "Fleet file", "running": "Running fleet"}


VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Have every server digest its weights, and compare.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 for warnings too, not only for errors.")
]


def doctor(
    file: FileOption = None,
    fleet: FleetOption = None,
    verify: VerifyOption = False,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Examine this machine, the fleet file and the running fleet; each finding has its fix.

    Changes nothing. Exit code 1 when it finds an error. With -q only errors and warnings are
    printed. Without a fleet file it examines the machine alone.

    \b
    Examples:
      skyctl doctor
      skyctl doctor -f fleets/production.yaml --strict
      skyctl doctor --json | jq -r '.data.findings[].fix'
    """
    from skyctl.core.findings import Severity
    from skyctl.doctor.check_line import count

    ref: FleetRef | None = None
    refusal: FleetFileError | None = None
    try:
        ref = select(file, fleet)
    except FleetFileError as error:
        refusal = error
    except NotFoundError:
        if file is not None or fleet is not None:
            raise
    findings = _findings(ref, refusal, verify)
    errors, warnings = count(findings, Severity.ERROR), count(findings, Severity.WARNING)
    data = {
        "fleet": ref.name if ref else None,
        "findings": [finding.to_json() for finding in findings],
        "errors": errors,
        "warnings": warnings,
    }
    shown = [f for f in findings if f.severity is not Severity.OK or not mode.quiet]
    counts = [(errors, "error"), (warnings, "warning")]
    verdict = ", ".join(count_of(number, noun) for number, noun in counts if number)
    verdict = verdict or "nothing to fix"
    failed = SkyctlError(verdict) if errors or (strict and warnings) else None
    output.emit(data, *_lines(shown), None if failed else verdict, error=failed)


def _findings(
    ref: FleetRef | None, refusal: FleetFileError | None, verify: bool
) -> list[CheckLine]:
    from skyctl.core.findings import Severity
    from skyctl.doctor import examine, examine_machine
    from skyctl.doctor.check_line import CheckLine

    if ref is not None:
        return in_loop(examine(ref, verify=verify))
    if refusal is None:
        output.note("there is no fleet file here: looking at the machine alone")
        return examine_machine()
    wrong = CheckLine("fleet-file", "load", Severity.ERROR, refusal.message, refusal.hint)
    return [*examine_machine(), wrong]


def _lines(findings: Sequence[CheckLine]) -> list[Text]:
    signs = {"ok": ("✓ ", "green"), "warning": ("! ", "yellow"), "error": ("✗ ", "bold red")}
    lines: list[Text] = []
    for section, title in _TITLES.items():
        section_findings = [finding for finding in findings if finding.section == section]
        if section_findings:
            lines += [Text(), Text(title, "bold")] if lines else [Text(title, "bold")]
        for finding in section_findings:
            sign, style = signs[finding.severity]
            first, *more_lines = output.wrapped(finding.message, indent=len(sign))
            lines.append(Text.assemble((sign, style), first))
            lines += [Text(" " * len(sign) + line) for line in more_lines]
            if finding.fix:
                lines.append(Text(f"  → {finding.fix}", "dim"))
    return [*lines, Text()] if lines else []
