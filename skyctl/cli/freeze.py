"""`skyctl pause` and `resume`, `sleep` and `wake`: freeze and thaw the whole fleet, and release its
GPU memory.
"""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl.cli.fleet_calls import run_verb
from skyctl.cli.options import (
    FileOption,
    FleetOption,
    JsonOption,
    PauseModeOption,
    ServersArgument,
    TimeoutOption,
)
from skyctl.errors import UsageError

TAGS = ("weights", "kv_cache")
THE_FREEZE = "The freeze"  # a panel of --help


def pause(
    servers: ServersArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    mode: Annotated[
        PauseModeOption,
        typer.Option(
            help="Running requests: end, finish, or wait until resume.", rich_help_panel=THE_FREEZE
        ),
    ] = PauseModeOption.ABORT,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache/--keep-cache",
            help="KV caches (kept with mode keep).",
            rich_help_panel=THE_FREEZE,
        ),
    ] = True,
    keep_partial: Annotated[
        bool,
        typer.Option(
            "--keep-partial",
            help="When some fail, leave the others paused.",
            rich_help_panel=THE_FREEZE,
        ),
    ] = False,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Stop generation on every server at once.

    New requests wait until resume. When some servers cannot be paused, those that were are
    resumed again, so that the fleet never runs half frozen by accident.

    \b
    skyctl pause --mode keep             # freeze requests where they are
    skyctl pause --mode wait --timeout 300
    skyctl pause demo-0 demo-1           # only these servers
    """
    from skyctl.core.requests import Pause

    request = Pause(
        mode=mode.value,
        clear_cache=clear_cache,
        keep_partial=keep_partial,
        servers=tuple(servers or ()),
        timeout_s=timeout,
    )
    run_verb(
        file,
        fleet,
        request,
        done="paused",
        note=f"mode {mode.value}",
        shows_waits=mode is PauseModeOption.WAIT,
    )


def resume(
    servers: ServersArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also servers that another fleet, or a lost record of this one, froze."
        ),
    ] = False,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Let every server generate again; frozen requests continue where they were.

    A server that another fleet froze refuses: that fleet may be pushing weights into it. Use
    --force only where that fleet is gone.

    \b
    skyctl resume
    skyctl resume demo-1
    skyctl resume --force
    """
    from skyctl.core.requests import Resume

    request = Resume(servers=tuple(servers or ()), force=force, timeout_s=timeout)
    run_verb(file, fleet, request, done="resumed")


def sleep(
    servers: ServersArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory, 2 discards them.")
    ] = 1,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Free the servers' GPU memory; they answer nothing until they wake.

    After level 2 the weights are gone: `skyctl wake --tags weights`, then `skyctl sync-weights`,
    then `skyctl wake --tags kv_cache`. On CPU only the state changes and no memory is freed.

    \b
    skyctl sleep
    skyctl sleep --level 2
    """
    from skyctl.core.requests import Sleep

    request = Sleep(level=level, servers=tuple(servers or ()), timeout_s=timeout)
    run_verb(file, fleet, request, done="put to sleep", note=f"level {level}")


def wake(
    servers: ServersArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    tags: Annotated[
        str,
        typer.Option(metavar="TAGS", help="Only these, separated by commas: weights, kv_cache."),
    ] = "",
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Take back the memory that sleep released, and serve again.

    Refused when it would serve weights that `sleep --level 2` discarded.

    \b
    skyctl wake
    skyctl wake --tags weights
    """
    from skyctl.core.requests import Wake

    request = Wake(tags=parse_tags(tags), servers=tuple(servers or ()), timeout_s=timeout)
    run_verb(file, fleet, request, done="woke", note=", ".join(request.tags))


def parse_tags(text: str) -> tuple[str, ...]:
    """`weights,kv_cache` as a tuple; empty means everything.

    Raises:
        UsageError: a tag that vLLM does not have.
    """
    tags = tuple(tag.strip() for tag in text.split(",") if tag.strip())
    for tag in tags:
        if tag not in TAGS:
            raise UsageError(f"{tag!r} cannot be woken", hint=f"tags are: {', '.join(TAGS)}")
    return tags
