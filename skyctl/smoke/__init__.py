"""The CI test of a whole fleet: one pass through everything a fleet is for; and its result as JSON,
JUnit XML and a Markdown summary.

Its steps (`steps.py`) run within their deadline; logs are kept, and the fleet is always taken down.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from skyctl.core.registry import FleetRef, left_alone, supervisor_running
from skyctl.engines.logs import tail
from skyctl.errors import ConflictError, SkyctlError, UsageError
from skyctl.service import connect
from skyctl.smoke.steps import FleetUnderTest, Skipped, SmokeOptions, Step, down, steps_for
from skyctl.units import format_seconds

DOWN_TIMEOUT_S = 180.0
_LOG_LINES = 40


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
    """The result of one step."""

    name: str
    """The step's name."""
    status: StepStatus
    """How it ended."""
    seconds: float
    """How long it took."""
    detail: str
    """What it saw, or why it failed or was skipped."""
    hint: str = ""
    """What to type after a failure."""

    @property
    def ok(self) -> bool:
        return self.status in (StepStatus.PASSED, StepStatus.SKIPPED)


@dataclass(frozen=True)
class SmokeReport:
    """The result of a smoke test."""

    fleet: str
    """The fleet's name."""
    steps: tuple[StepResult, ...]
    """Every step, in order."""
    began_at: float
    """When it began, in seconds since the epoch."""
    seconds: float
    """How long all steps took."""
    logs: dict[str, list[str]]
    """The end of each process's log, if a step failed."""
    kept: str | None = None
    """The directory where logs and the fleet's status were saved."""

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


async def smoke(
    ref: FleetRef,
    options: SmokeOptions,
    *,
    on_begin: Callable[[str], None] = lambda name: None,
    on_end: Callable[[StepResult], None] = lambda result: None,
    steps: Sequence[Step] | None = None,
    last: Step = Step("down", down),
) -> SmokeReport:
    """Run every step; after a failed one the rest are skipped, and the fleet is taken down.

    `steps` are those the options ask for; `last` always runs, except on a reused fleet.

    Raises:
        ConflictError: the fleet is already running (unless it is to be reused).
        UsageError: the fleet is attached, and so cannot be started.
    """
    _refuse(ref, options)
    run = FleetUnderTest(ref, options)
    began_at, began = time.time(), time.monotonic()
    results, logs = list[StepResult](), dict[str, list[str]]()
    kept: Path | None = None

    async def take(step: Step, timeout_s: float) -> None:
        nonlocal logs, kept
        on_begin(step.name)
        result = await _run_step(step, run, timeout_s)
        results.append(result)
        on_end(result)
        if not result.ok and not logs:
            logs = {log.stem: tail(log, _LOG_LINES) for log in sorted(ref.paths.logs.glob("*.log"))}
            kept = await _keep(ref, options)

    try:
        for step in steps_for(options) if steps is None else steps:
            if all(result.ok for result in results):
                await take(step, options.timeout_s - (time.monotonic() - began))
            else:
                results.append(StepResult(step.name, StepStatus.SKIPPED, 0.0, "not tried"))
    finally:
        if not options.reuse:
            await take(last, DOWN_TIMEOUT_S)  # also after Ctrl-C: nothing of ours keeps running
    return SmokeReport(
        fleet=ref.name,
        steps=tuple(results),
        began_at=began_at,
        seconds=time.monotonic() - began,
        logs=logs,
        kept=str(kept) if kept else None,
    )


def _refuse(ref: FleetRef, options: SmokeOptions) -> None:
    if options.reuse:
        return
    if ref.config.attached:
        raise UsageError(
            f"fleet {ref.name} is attached: skyctl cannot start its servers",
            hint="test it as it is: skyctl smoke --reuse",
        )
    if supervisor_running(ref.paths) or left_alone(ref.paths):
        raise ConflictError(
            f"fleet {ref.name} is running, and smoke would start it and take it down",
            hint="test it as it is and leave it up: skyctl smoke --reuse; or first: skyctl down",
        )


async def _run_step(step: Step, run: FleetUnderTest, timeout_s: float) -> StepResult:
    began = time.monotonic()

    def ended(status: StepStatus, detail: str, hint: str = "") -> StepResult:
        return StepResult(step.name, status, time.monotonic() - began, detail, hint)

    try:
        async with asyncio.timeout(max(timeout_s, 0.0)):
            return ended(StepStatus.PASSED, await step.run(run))
    except Skipped as reason:
        return ended(StepStatus.SKIPPED, str(reason))
    except SkyctlError as error:
        return ended(StepStatus.FAILED, error.message, error.hint)
    except TimeoutError:
        detail = f"not done after {timeout_s:.0f} s, which is all the time that was left"
        return ended(StepStatus.FAILED, detail, "give it more: --timeout SECONDS")
    except Exception as error:
        return ended(StepStatus.ERROR, f"{type(error).__name__}: {error}")


async def _keep(ref: FleetRef, options: SmokeOptions) -> Path | None:
    """Copy every log, the fleet file and the status to where the user wants them."""
    directory = options.keep_logs
    if directory is None:
        return None
    files = [*ref.paths.logs.glob("*.log*"), ref.paths.fleet_file]
    await asyncio.to_thread(_copy, files, directory)
    try:
        async with asyncio.timeout(10.0), connect(ref) as fleet:
            status = (await fleet.status()).to_json()
    except (SkyctlError, TimeoutError) as error:
        status = {"error": str(error)}
    (directory / "status.json").write_text(json.dumps(status, indent=2) + "\n")
    return directory


def _copy(files: Sequence[Path], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.exists():
            shutil.copyfile(file, directory / file.name)


def junit_xml(report: SmokeReport) -> str:
    """One test suite with a test case per step; logs go with the step that failed."""
    counts = {status: sum(s.status is status for s in report.steps) for status in StepStatus}
    suite = ElementTree.Element(
        "testsuite",
        name=f"skyctl smoke: {report.fleet}",
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
                ends = [f"── {name}\n" + "\n".join(log) for name, log in report.logs.items()]
                ElementTree.SubElement(case, "system-err").text = _clean("\n\n".join(ends))
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


def _clean(text: str) -> str:
    return text.translate(_NOT_XML)


def _cell(text: str) -> str:
    return escape(" ".join(text.split())).replace("|", "\\|")
