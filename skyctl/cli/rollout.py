"""`skyctl rollout`: what becomes of a change of the fleet file that was applied."""

from __future__ import annotations

from typing import Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import chosen, in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.units import format_ago

app = typer.Typer(help="The fleet files that were applied, and the way back.")


@app.callback(invoke_without_command=True)
def rollout(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The fleet files that were applied last, newest first; `undo` goes back.

    \b
    skyctl rollout
    skyctl rollout undo --dry-run
    """
    from skyctl.core.registry import kept_files, select

    if context.invoked_subcommand is not None:
        context.obj = (file, fleet)
        return
    files = [kept.file for kept in kept_files(select(file, fleet)) if kept.file is not None]
    applied = [(str(path), path.stat().st_mtime) for path in files]
    output.emit(
        {"files": [{"path": path, "kept_at": at} for path, at in applied]},
        output.table(["~FILE", ">KEPT"], [[path, format_ago(at)] for path, at in applied])
        if applied
        else "no file was applied yet",
    )


@app.command()
def undo(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="Restart so many replicas at a time.")
    ] = 1,
    timeout: Annotated[
        float | None, seconds("Stop waiting after this long; the change goes on.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="On a terminal: do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Return to the last fleet file that was applied, as `up` would with that file.

    If what runs is what that file has, return to the one before; a second undo comes back. The file
    that you edit stays as it is: `status` says that it has changes that are not applied.

    \b
    Examples:
      skyctl rollout undo --dry-run
      skyctl rollout undo
    """
    from skyctl.cli.fleet_view import status_view
    from skyctl.cli.up import bring_up, confirmed, on_terminal
    from skyctl.core.registry import select
    from skyctl.service.bring_up import earlier

    target, router, changes = in_loop(earlier(select(*chosen(context, file, fleet))))
    asks = not yes and on_terminal()
    if (dry_run or asks) and not confirmed(target, changes, dry_run=dry_run):
        return
    status, message = bring_up(target, router, parallel, True, timeout, False)
    output.note(message)
    output.emit(status.to_json(), status_view(status))
