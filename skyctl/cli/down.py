"""`skyctl down`: stop a fleet and everything it started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.core.service import TakenDown
    from skyctl.store.paths import FleetPaths


def down(
    file: FileOption = None,
    fleet: FleetOption = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            "--drain-timeout",
            min=0,
            metavar="SECONDS",
            help="Wait this long for running requests (default: the fleet file's drain_timeout_s).",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Drain the fleet, then stop the router and every server with all their processes.

    Works without a supervisor too, and says so when nothing is running. Logs and the history of
    pushes stay on disk.

    \b
    Examples:
      skyctl down
      skyctl down --fleet tiny --drain-timeout 0
    """
    if fleet is not None and "://" in fleet:
        _bring_down_there(fleet, drain_timeout)
        return
    paths, drain_timeout_s, stop_timeout_s = _chosen(file, fleet)
    if drain_timeout is not None:
        drain_timeout_s = drain_timeout
    bring_down(paths, drain_timeout_s, stop_timeout_s)


def _chosen(file: Path | None, fleet: str | None) -> tuple[FleetPaths, float, float]:
    """The fleet's paths and its two deadlines; defaults if its file no longer loads."""
    from skyctl.core.registry import select, select_paths
    from skyctl.errors import FleetFileError
    from skyctl.service.bring_up import refuse_attached

    try:
        ref = select(file, fleet)
    except FleetFileError:
        if fleet is None:
            raise
        return select_paths(file, fleet), 30.0, 15.0
    refuse_attached(ref)
    return ref.paths, ref.config.drain_timeout_s, ref.config.stop_timeout_s


def _bring_down_there(url: str, drain_timeout_s: float | None) -> None:
    """Take down a fleet on another machine."""
    from skyctl import output
    from skyctl.cli.asking import ask_fleet
    from skyctl.core.service import Down

    done = ask_fleet(None, url, lambda running: running.down(Down(drain_timeout_s)))
    said = f"fleet {url} is down: stopped {', '.join(done.stopped) or 'nothing'}"
    output.emit({"name": url, "stopped": list(done.stopped)}, said)


def bring_down(paths: FleetPaths, drain_timeout_s: float, stop_timeout_s: float) -> None:
    """Take the fleet down and print what was stopped."""
    from skyctl import output
    from skyctl.service.bring_down import take_down

    async def work() -> TakenDown:
        output.note(f"stopping fleet {paths.name} (draining for at most {drain_timeout_s:g} s)")
        return await take_down(
            paths, drain_timeout_s=drain_timeout_s, stop_timeout_s=stop_timeout_s
        )

    done = asyncio.run(work())
    if done.stopped:
        said = f"fleet {paths.name} is down: stopped {', '.join(done.stopped)}"
    else:
        said = f"fleet {paths.name} is down: nothing was running"
    output.emit({"name": paths.name, "stopped": list(done.stopped)}, said)
