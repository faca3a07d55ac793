"""Lines of doctor, and how its checks make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, ParamSpec

from skyctl.core.findings import Severity

P = ParamSpec("P")
Section = Literal["machine", "fleet-file", "running"]


@dataclass(frozen=True)
class CheckLine:
    """One line about one subject, and how to fix it."""

    section: Section
    """The part of doctor that made it."""
    check: str
    """The stable name of its check."""
    severity: Severity
    """Whether there is something to fix."""
    message: str
    """The finding, in one line."""
    fix: str = ""
    """The command to type or the setting to change."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Result = tuple[Severity, str, str]
"""What a check yields: severity, message and fix."""


def ok(message: str) -> Result:
    return Severity.OK, message, ""


def warning(message: str, fix: str) -> Result:
    return Severity.WARNING, message, fix


def error(message: str, fix: str) -> Result:
    return Severity.ERROR, message, fix


def run_checks(
    section: Section,
    checks: Mapping[str, Callable[P, Iterator[Result]]],
    *facts: P.args,
    **named: P.kwargs,
) -> list[CheckLine]:
    """The findings of checks, which are given by their stable names."""
    return [
        CheckLine(section, name, *result)
        for name, check in checks.items()
        for result in check(*facts, **named)
    ]


def count(findings: Iterable[CheckLine], severity: Severity) -> int:
    """How many findings are of this severity."""
    return sum(finding.severity is severity for finding in findings)
