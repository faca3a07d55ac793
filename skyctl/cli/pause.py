"""`skyctl pause` and `skyctl resume`: freeze and thaw the whole fleet."""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl.cli.asking import run_verb
from skyctl.cli.options import (
    FileOption,
    FleetOption,
    JsonOption,
    PauseModeOption,
    ServerOption,
    TimeoutOption,
)


def pause(
    file: FileOption = None,
    fleet: FleetOption = None,
    mode: Annotated[
        PauseModeOption,
        typer.Option(help="Running requests are aborted, waited for, or kept frozen until resume."),
    ] = PauseModeOption.ABORT,
    clear_cache: Annotated[
        bool,
        typer.Option("--clear-cache/--keep-cache", help="Clear KV caches (never with mode keep)."),
    ] = True,
    server: ServerOption = None,
    keep_partial: Annotated[
        bool,
        typer.Option(
            "--keep-partial", help="When some servers cannot be paused, leave the others paused."
        ),
    ] = False,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Stop generation on every server at once.

    New requests wait until resume. When some servers cannot be paused, those that were are
    resumed again, so that the fleet never runs half frozen by accident.

    \b
    skyctl pause --mode keep             freeze requests where they are
    skyctl pause --mode wait --timeout 300
    """
    from skyctl.core.service import Pause

    asked = Pause(
        mode=mode.value,
        clear_cache=clear_cache,
        keep_partial=keep_partial,
        servers=tuple(server or ()),
        timeout_s=timeout,
    )
    run_verb(file, fleet, asked, done="paused", note=f"mode {mode.value}")


def resume(
    file: FileOption = None,
    fleet: FleetOption = None,
    server: ServerOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Let every server generate again; frozen requests continue where they were.

    \b
    skyctl resume
    skyctl resume --server demo-1
    """
    from skyctl.core.service import Resume

    asked = Resume(servers=tuple(server or ()), timeout_s=timeout)
    run_verb(file, fleet, asked, done="resumed")
