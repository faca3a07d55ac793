"""`skyctl up` and `skyctl down`: start a fleet or update it to its file, and stop all of it."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import call_chosen_fleet, follow, in_loop
from skyctl.cli.fleet_file import FileArgument, chosen_fleet
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import (
    Files,
    is_url,
    refuse_another_file,
    select,
    select_paths,
    supervisor_running,
)
from skyctl.errors import DeadlineExceeded, FleetFileError, SkyctlError, UsageError

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.core.requests import TakenDown
    from skyctl.core.status import FleetStatus
    from skyctl.store.paths import FleetPaths
    from skyctl.supervisor.reconcile import Preview


RESTARTS = "Restarts after a change"  # a panel of --help


def up(
    path: FileArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    attach: Annotated[
        bool,
        typer.Option("--attach", help="Stay, follow the logs, and bring the fleet down on Ctrl-C."),
    ] = False,
    timeout: Annotated[
        float | None,
        seconds("Stop waiting after this long; the fleet keeps starting."),
    ] = None,
    no_router: Annotated[bool, typer.Option("--no-router", help="Start no router.")] = False,
    rollback: Annotated[
        bool,
        typer.Option(
            "--rollback",
            help="When a replica fails, stop all that this call started.",
            rich_help_panel=RESTARTS,
        ),
    ] = False,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel",
            min=1,
            metavar="N",
            help="Restart so many replicas at a time.",
            rich_help_panel=RESTARTS,
        ),
    ] = 1,
    no_undo: Annotated[
        bool,
        typer.Option(
            "--no-undo",
            help="Leave a replica that does not come back with its new settings.",
            rich_help_panel=RESTARTS,
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="On a terminal: restart and remove without asking.",
            rich_help_panel=RESTARTS,
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start the fleet and return when every replica and the router are ready.

    The fleet keeps running in the background. After a change of the fleet file, run it again: new
    replicas are started, then those that differ are restarted, drained, one at a time. The first
    that does not come back ends this and gets its old settings again; those after it are not
    touched. On a terminal it asks before it restarts or removes anything. Ctrl-C stops what this
    call started; a server that was just being restarted gets its old settings again, and the next
    `up` goes on.

    \b
    Examples:
      skyctl up
      skyctl up fleets/production.yaml --timeout 600
      skyctl up --dry-run
      skyctl up --parallel 4
      skyctl up --attach
    """
    from skyctl.cli.fleet_view import status_view

    if attach and as_json:
        raise UsageError("--attach and --json do not go together")
    ref = chosen_fleet(path, file, fleet)
    refuse_another_file(ref)
    asks = not yes and on_terminal()
    if (dry_run or asks) and not _confirmed(ref, not no_router, dry_run=dry_run):
        return
    status, message = bring_up(ref, not no_router, parallel, not no_undo, timeout, rollback)
    output.note(message)
    _note_entrance(ref)
    output.emit(status.to_json(), status_view(status))
    if attach:
        _stay(ref)


def _confirmed(ref: FleetRef, router: bool, *, dry_run: bool) -> bool:
    """Show what `up` would do; whether to go on, which it asks if something that runs would end.

    Raises:
        typer.Abort: the answer was no.
    """
    from skyctl.service.bring_up import preview_up, sleeps_first

    changes = in_loop(preview_up(ref, router=router))
    sleeps = in_loop(sleeps_first(ref)) if dry_run else ""
    return confirmed(ref, changes, dry_run=dry_run, sleeps=sleeps)


def confirmed(ref: FleetRef, changes: Preview, *, dry_run: bool = False, sleeps: str = "") -> bool:
    """The same for changes that are known, and what `sleeps` first. Raises typer.Abort."""
    from skyctl.cli.change_view import change_lines

    if dry_run:
        data = {"name": ref.name, "dry_run": True, "changes": changes.to_json()}
        first = [f"would put {sleeps} to sleep first"] if sleeps else []
        output.emit({**data, "sleeps": sleeps or None}, *first, *change_lines(ref.name, changes))
        return False
    if changes.disturbs:
        for line in change_lines(ref.name, changes):
            output.err.print(line)
        typer.confirm("do this?", abort=True, err=True)
    return True


def on_terminal() -> bool:
    """Whether someone can be asked."""
    return output.interactive() and sys.stdin.isatty()


def bring_up(
    ref: FleetRef,
    router: bool,
    parallel: int,
    undo_failed: bool,
    timeout_s: float | None,
    rollback: bool,
) -> tuple[FleetStatus, str]:
    """The status once everything is ready, and one line that says what was done."""
    from skyctl.service import connect
    from skyctl.service.bring_up import begin_up, undo
    from skyctl.service.switching import asleep_for

    mine, fresh, request_id = True, True, uuid.uuid4().hex

    async def work() -> tuple[FleetStatus, str]:
        nonlocal mine, fresh
        begun = await begin_up(
            ref,
            router=router,
            parallel=parallel,
            undo=undo_failed,
            note=output.note,
            request_id=request_id,
        )
        for warning in begun.plan.warnings:
            output.warn(warning)
        mine, fresh = not begun.joined, begun.fresh
        async with connect(ref) as fleet:
            if begun.operation == 0:
                return await fleet.status(), f"fleet {ref.name} is up to date, nothing to do"
            title = f"starting fleet {ref.name}"
            status = await follow(fleet, begun.operation, title, timeout_s=timeout_s)
        assert status.operation is not None and status.operation.ended_at is not None
        seconds = status.operation.ended_at - status.operation.began_at
        return status, f"fleet {ref.name} is ready after {seconds:.1f} s"

    try:
        return in_loop(work())
    except KeyboardInterrupt:
        if mine:
            in_loop(_stop(ref, request_id, fresh))
        else:
            output.warn("it goes on, another `up` began it: skyctl jobs; skyctl jobs cancel ID")
        raise
    except DeadlineExceeded:
        raise
    except SkyctlError as error:
        if rollback and mine and "status" in error.details:
            in_loop(undo(ref.paths, request_id))
            error.hint = "everything this call started was stopped again (--rollback)"
        if fresh:
            error.hint = "; ".join(filter(None, (error.hint, asleep_for(ref))))
        raise


async def _stop(ref: FleetRef, request_id: str, fresh: bool) -> None:
    from skyctl.service.bring_up import undo
    from skyctl.service.switching import asleep_for

    # printed once the loop runs, which takes the next Ctrl-C without a traceback
    output.note("interrupted: stopping what was started (Ctrl-C again to leave it)")
    await undo(ref.paths, request_id)
    if not fresh:
        output.note("what was changed before that stays so; go on with it: skyctl up")
    elif others := asleep_for(ref):
        output.note(others)


def _note_entrance(ref: FleetRef) -> None:
    """Say how other machines reach the fleet, if they may."""
    from skyctl.supervisor.listening import entrance

    access = entrance(ref.config.supervisor, ref.base_dir, ref.paths)
    if access is None:
        return
    ca = f" --ca {access.cert}" if access.cert is not None else ""
    output.note(
        f"elsewhere: skyctl --token-file {access.token_file}{ca} status --fleet {access.url}"
    )
    if fingerprint := access.fingerprint():
        output.note(f"SHA-256 of its certificate: {fingerprint}")


def _stay(ref: FleetRef) -> None:
    """Follow the logs until Ctrl-C (or the fleet ends), then take the fleet down."""
    from skyctl.cli.logs import follow_logs
    from skyctl.core.requests import LogQuery

    output.note("following the logs; Ctrl-C brings the fleet down")
    try:
        follow_logs(ref.paths, LogQuery(lines=0))
    except KeyboardInterrupt:
        _bring_down(ref.paths, ref.config.drain_timeout_s, ref.config.stop_timeout_s)


def down(
    file: FileOption = None,
    fleet: FleetOption = None,
    drain_timeout: Annotated[
        float | None,
        seconds("Wait this long for running requests (default: the fleet file's drain_timeout_s)."),
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
    from skyctl.core.requests import Down

    if is_url(fleet):
        done = call_chosen_fleet(None, fleet, lambda running: running.down(Down(drain_timeout)))
        message = f"fleet {fleet} is down: stopped {', '.join(done.stopped) or 'nothing'}"
        output.emit({"name": fleet, "stopped": list(done.stopped)}, message)
        return
    paths, drain_timeout_s, stop_timeout_s = _chosen(file, fleet)
    if drain_timeout is not None:
        drain_timeout_s = drain_timeout
    _bring_down(paths, drain_timeout_s, stop_timeout_s)


def _chosen(file: Files, fleet: str | None) -> tuple[FleetPaths, float, float]:
    """The fleet's paths and its two deadlines; defaults if its file no longer loads."""
    from skyctl.service.bring_up import refuse_attached

    try:
        ref = select(file, fleet)
    except FleetFileError:
        if fleet is None:
            raise
        return select_paths(file, fleet), 30.0, 15.0
    refuse_another_file(ref)
    if not supervisor_running(ref.paths):
        refuse_attached(ref)
    return ref.paths, ref.config.drain_timeout_s, ref.config.stop_timeout_s


def _bring_down(paths: FleetPaths, drain_timeout_s: float, stop_timeout_s: float) -> None:
    """Take the fleet down and print what was stopped."""
    from skyctl.service.bring_down import take_down

    async def work() -> TakenDown:
        output.note(f"stopping fleet {paths.name} (draining for at most {drain_timeout_s:g} s)")
        return await take_down(
            paths, drain_timeout_s=drain_timeout_s, stop_timeout_s=stop_timeout_s
        )

    stopped = list(in_loop(work()).stopped)
    outcome = f"stopped {', '.join(stopped)}" if stopped else "nothing was running"
    output.emit({"name": paths.name, "stopped": stopped}, f"fleet {paths.name} is down: {outcome}")
