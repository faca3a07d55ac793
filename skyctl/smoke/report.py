"""The result of a smoke test as JSON, JUnit XML, and a Markdown summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from skyctl.units import format_seconds


class StepStatus(StrEnum):
    """failed: the fleet did not do it; error: skyctl itself broke; skipped: it was not tried."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"


_SIGNS = {
    StepStatus.PASSED: "✅",
    StepStatus.FAILED: "❌",
    StepStatus.ERROR: "💥",
    StepStatus.SKIPPED: "⏭️",
}
# what XML 1.0 cannot hold, escaped or not
_NOT_XML = {code: "�" for code in range(32) if chr(code) not in "\t\n\r"}


@dataclass(frozen=True)
class StepResult:
    """One step. `detail` is what it found, or why it failed or was skipped."""

    name: str
    status: StepStatus
    seconds: float
    detail: str
    hint: str = ""

    @property
    def ok(self) -> bool:
        return self.status in (StepStatus.PASSED, StepStatus.SKIPPED)


@dataclass(frozen=True)
class SmokeReport:
    """All steps in order. `logs` maps a process to the end of its log, if a step failed; `kept` is
    the directory where its logs and the fleet's status were saved.
    """

    fleet: str
    steps: tuple[StepResult, ...]
    began_at: float
    seconds: float
    logs: dict[str, list[str]]
    kept: str | None = None

    @property
    def passed(self) -> bool:
        return all(step.ok for step in self.steps)

    @property
    def first_failure(self) -> StepResult | None:
        return next((step for step in self.steps if not step.ok), None)

    def to_json(self) -> dict[str, Any]:
        """What `skyctl smoke --json` prints."""
        return {
            "fleet": self.fleet,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "steps": [{**asdict(s), "seconds": round(s.seconds, 3)} for s in self.steps],
            "kept": self.kept,
        }


def junit_xml(report: SmokeReport) -> str:
    """One test suite with a test case per step; logs go with the step that failed."""
    counts = {status: sum(s.status is status for s in report.steps) for status in StepStatus}
    suite = ElementTree.Element(
        "testsuite",
        name=f"skyctl smoke {report.fleet}",
        tests=str(len(report.steps)),
        failures=str(counts[StepStatus.FAILED]),
        errors=str(counts[StepStatus.ERROR]),
        skipped=str(counts[StepStatus.SKIPPED]),
        time=f"{report.seconds:.3f}",
    )
    for step in report.steps:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"skyctl.smoke.{report.fleet}",
            name=step.name,
            time=f"{step.seconds:.3f}",
        )
        if step.status is StepStatus.PASSED:
            ElementTree.SubElement(case, "system-out").text = _clean(step.detail)
        elif step.status is StepStatus.SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_clean(step.detail))
        else:
            tag = "failure" if step.status is StepStatus.FAILED else "error"
            failure = ElementTree.SubElement(case, tag, message=_clean(step.detail))
            failure.text = _clean("\n".join(filter(None, (step.detail, step.hint))))
            if step is report.first_failure:
                ElementTree.SubElement(case, "system-err").text = _clean(_logs(report))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def markdown(report: SmokeReport) -> str:
    """A verdict, a table of steps, and if one failed the ends of the logs, folded."""
    sign = _SIGNS[StepStatus.PASSED if report.passed else StepStatus.FAILED]
    verdict = "passed" if report.passed else "failed"
    lines = [
        f"### {sign} Fleet `{report.fleet}` {verdict} in {format_seconds(report.seconds)}",
        "",
        "| | step | time | |",
        "|---|---|--:|---|",
    ]
    for step in report.steps:
        shown = "" if step.status is StepStatus.SKIPPED else format_seconds(step.seconds)
        lines.append(f"| {_SIGNS[step.status]} | {step.name} | {shown} | {_cell(step.detail)} |")
    failure = report.first_failure
    if failure is not None and failure.hint:
        lines += ["", f"Next: {_cell(failure.hint)}"]
    for name, ending in report.logs.items():
        text = escape("\n".join(ending))
        lines += [
            "",
            f"<details><summary>end of the log of {name}</summary>",
            "",
            f"<pre>{text}</pre>",
            "</details>",
        ]
    return "\n".join(lines) + "\n"


def _logs(report: SmokeReport) -> str:
    parts = [f"── {name}\n" + "\n".join(lines) for name, lines in report.logs.items()]
    return "\n\n".join(parts)


def _clean(text: str) -> str:
    return text.translate(_NOT_XML)


def _cell(text: str) -> str:
    return escape(" ".join(text.split())).replace("|", "\\|")
