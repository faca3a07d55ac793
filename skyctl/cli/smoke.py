"""`skyctl smoke`: test everything a fleet is for, in CI."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import select
from skyctl.errors import SkyctlError
from skyctl.units import format_seconds

if TYPE_CHECKING:
    from rich.text import Text

    from skyctl.errors import SkyctlError
    from skyctl.smoke import SmokeReport, StepResult

_SIGNS = {
    "passed": ("✓ ", "green"),
    "failed": ("✗ ", "bold red"),
    "error": ("✗ ", "bold red"),
    "skipped": ("– ", "dim"),
}


REPORT = "What is written"  # a panel of --help

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        metavar="CKPT",
        help="Another checkpoint of the same model: pushed too, and then the first one again.",
        autocompletion=complete.checkpoints,
    ),
]
ReuseOption = Annotated[
    bool, typer.Option("--reuse", help="Test the running fleet, and leave it up.")
]
AllStepsTimeoutOption = Annotated[float, seconds("For all steps together, without down.", least=1)]
JunitOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write JUnit XML.", rich_help_panel=REPORT),
]
SummaryOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="GITHUB_STEP_SUMMARY",
        help="Append a Markdown summary.",
        rich_help_panel=REPORT,
    ),
]
KeepLogsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="When a step fails, keep every process's log and the status here.",
        rich_help_panel=REPORT,
    ),
]


def smoke(
    file: FileOption = None,
    fleet: FleetOption = None,
    checkpoint: CheckpointOption = None,
    reuse: ReuseOption = False,
    timeout: AllStepsTimeoutOption = 900.0,
    junit: JunitOption = None,
    summary: SummaryOption = None,
    keep_logs: KeepLogsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start the fleet, generate, freeze a stream, push weights, verify them, and take it down.

    Stops at the first step that fails (exit code 1), and leaves nothing running in any case.

    \b
    Examples:
      skyctl smoke
      skyctl smoke --checkpoint checkpoints/b --junit smoke.xml --keep-logs logs
      skyctl smoke --reuse
    """
    from skyctl.checkpoints.checkpoint import absolute
    from skyctl.smoke import smoke as run_smoke
    from skyctl.smoke.steps import SmokeOptions

    other = None if checkpoint is None else absolute(checkpoint)
    options = SmokeOptions(other, reuse, timeout, keep_logs)
    ref = select(file, fleet)
    report = run_until_terminated(
        run_smoke(
            ref,
            options,
            on_begin=lambda name: output.note(f"{name} …"),
            on_end=lambda result: output.note(_line(result)),
        )
    )
    _write(report, junit, summary)
    error = _error(report, attached=ref.attached)
    output.emit(report.to_json(), *_lines(report), error=error)


def _error(report: SmokeReport, *, attached: bool) -> SkyctlError | None:
    """The error of the first step that failed, with where to read its logs."""
    failure = report.first_failure
    if failure is None:
        return None
    logs = (
        f"logs: {report.kept}" if report.kept else "" if attached else "read the logs: skyctl logs"
    )
    hint = "; ".join(filter(None, (failure.hint, logs)))
    message = f"smoke: {failure.name} {failure.status}: {failure.detail}"
    return SkyctlError(message, hint=hint, details=report.to_json())


def run_until_terminated(test: Coroutine[Any, Any, SmokeReport]) -> SmokeReport:
    """Run the test; TERM, with which CI ends a job, stops it as Ctrl-C does.

    Raises:
        KeyboardInterrupt: it was stopped, and has taken its fleet down.
    """

    async def run() -> SmokeReport:
        task = asyncio.current_task()
        assert task is not None  # this code runs in it
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await test

    try:
        return in_loop(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _write(report: SmokeReport, junit: Path | None, summary: Path | None) -> None:
    from skyctl.smoke import junit_xml, markdown

    try:
        if junit is not None:
            junit.parent.mkdir(parents=True, exist_ok=True)
            junit.write_text(junit_xml(report), encoding="utf-8")
        if summary is not None:
            with summary.open("a", encoding="utf-8") as page:
                page.write(markdown(report))
    except OSError as error:
        raise SkyctlError(f"cannot write {error.filename}: {error.strerror}") from error


def _line(result: StepResult) -> Text:
    sign, style = _SIGNS[result.status]
    seconds = "" if result.status == "skipped" else f"{format_seconds(result.seconds):>8}  "
    return Text.assemble((sign, style), f"{result.name:<13}", (seconds, "dim"), result.detail)


def _lines(report: SmokeReport) -> list[Text | str]:
    passed = sum(step.status == "passed" for step in report.steps)
    verdict = f"{passed} of {len(report.steps)} steps passed in {format_seconds(report.seconds)}"
    # a terminal has already shown them one by one
    seen = output.interactive() and output.out.is_terminal
    steps = [] if seen else [_line(step) for step in report.steps]
    return [*steps, f"fleet {report.fleet}: {verdict}"]
