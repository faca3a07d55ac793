"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

Section = Literal["machine", "fleet-file", "running"]


class Severity(StrEnum):
    """error: something fails, or will; warning: something to check; ok: nothing to do."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line about one subject, and how to fix it. `check` is a stable name."""

    section: Section
    check: str
    severity: Severity
    message: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class About:
    """Makes the findings of one section."""

    section: Section

    def ok(self, check: str, message: str) -> Finding:
        return Finding(self.section, check, Severity.OK, message)

    def warning(self, check: str, message: str, fix: str) -> Finding:
        return Finding(self.section, check, Severity.WARNING, message, fix)

    def error(self, check: str, message: str, fix: str) -> Finding:
        return Finding(self.section, check, Severity.ERROR, message, fix)


def count(findings: Iterable[Finding], severity: Severity) -> int:
    """How many findings are of this severity."""
    return sum(finding.severity is severity for finding in findings)
