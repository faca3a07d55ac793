"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

Section = Literal["machine", "fleet-file", "running"]


class Severity(StrEnum):
    """error: something fails, or will; warning: something to look at; ok: nothing to do."""

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


def count(findings: Iterable[Finding], severity: Severity) -> int:
    """How many findings are of this severity."""
    return sum(finding.severity is severity for finding in findings)
