"""Calls to a fleet, as commands make them: one call, a verb with its table, an operation with its
progress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from skyctl.output_mode import mode
from skyctl.startup import hold_interrupts
from skyctl.units import count_of

if TYPE_CHECKING:
    from skyctl.core.registry import Files, FleetRef, RemoteRef
    from skyctl.core.requests import Control, Outcomes
    from skyctl.core.status import FleetStatus
    from skyctl.service import FleetService

B = TypeVar("B")
T = TypeVar("T")


def chosen(context: typer.Context, file: Files, fleet: str | None) -> tuple[Files, str | None]:
    """-f and --fleet as given after the subcommand, else before it."""
    outer: tuple[Files, str | None] = context.obj or (None, None)
    return (file, fleet) if file or fleet else outer


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, with Ctrl-C blocked while the loop is made.

    An interrupted constructor would leave half a loop, whose finalizer prints errors on stderr.
    """
    hold_interrupts(True)
    try:
        with contextlib.closing(work), asyncio.Runner() as runner:
            hold_interrupts(False)
            return runner.run(work)
    finally:
        hold_interrupts(False)


def call_chosen_fleet(
    file: Files, fleet: str | None, call: Callable[[FleetService], Awaitable[T]]
) -> T:
    """Make one call to the chosen fleet, in an event loop of its own."""
    from skyctl.core.registry import find

    return call_fleet(find(file, fleet), call)


def call_fleet(
    ref: FleetRef | RemoteRef,
    call: Callable[[FleetService], Awaitable[T]],
    job_hint: Callable[[], str] = lambda: "",
) -> T:
    """Make one call to a fleet, in an event loop of its own; `job_hint` as in `run_following`."""
    from skyctl.service import connect

    async def run() -> T:
        async with connect(ref) as running:
            return await call(running)

    return run_following(run(), job_hint)


def begun_and_followed(
    ref: FleetRef | RemoteRef,
    begin: Callable[[FleetService], Awaitable[B]],
    follow: Callable[[FleetService, B], Awaitable[T]],
    job_hint: Callable[[B], str],
) -> T:
    """Begin something in a fleet and follow it. Ctrl-C leaves it running, and `job_hint` of what
    has begun says how to go on.
    """
    begun: list[B] = []

    async def run(running: FleetService) -> T:
        begun.append(await begin(running))
        return await follow(running, begun[0])

    return call_fleet(ref, run, lambda: job_hint(begun[0]) if begun else "")


def run_verb(
    file: Files,
    fleet: str | None,
    request: Control,
    *,
    done: str,
    note: str = "",
    shows_waits: bool = False,
) -> None:
    """Call every server, then print the outcomes and a line such as `paused 2 of 2 servers …`.
    `shows_waits`: meanwhile, which requests are waited for.

    Exits with 3 if some servers failed, 1 if all did, 124 if all timed out.
    """
    from skyctl import output
    from skyctl.http.fanout import failure

    async def call(running: FleetService) -> Outcomes:
        if not shows_waits:
            return await running.control(request)
        from skyctl.cli.job_view import follow_control

        return await follow_control(running, request)

    outcomes = call_chosen_fleet(file, fleet, call)
    rows = [outcome.to_json() for outcome in outcomes]
    ok = sum(row["status"] == "ok" for row in rows)
    elapsed_ms = max((row["elapsed_ms"] for row in rows), default=0.0)
    footer = f"{done} {ok} of {count_of(len(rows), 'server')} in {elapsed_ms:.0f} ms"
    output.emit(
        {"outcomes": rows, "done": ok, "servers": len(rows), "elapsed_ms": elapsed_ms},
        output.outcome_table(rows),
        f"{footer} ({note})" if note else footer,
        error=failure(outcomes, request.verb),
    )


async def follow(
    fleet: FleetService, operation: int, title: str, *, timeout_s: float | None = None
) -> FleetStatus:
    """Draw an operation's progress until it has ended; returns the last status.

    Raises:
        SkyctlError: it failed. DeadlineExceeded: it goes on after `timeout_s` seconds.
    """
    from skyctl import output
    from skyctl.cli.fleet_view import OperationView, log_tail
    from skyctl.engines.logs import telling_line
    from skyctl.service.bring_up import follow_operation
    from skyctl.service.ended import operation_error

    view = OperationView(title)
    with output.live(view.render, transient=True) as live:
        view.drawing = live.drawing
        status = await follow_operation(fleet, operation, view.see, timeout_s=timeout_s)
    error = await operation_error(fleet, status)
    if error is None:
        return status
    if not mode.json:
        for name, lines in error.details["logs"].items():
            if lines:
                output.err.print(log_tail(name, lines, telling_line(lines)))
    raise error


def run_following(body: Coroutine[Any, Any, T], job_hint: Callable[[], str]) -> T:
    """Run a coroutine that follows a job; Ctrl-C leaves the job running and says how to go on."""
    try:
        return in_loop(body)
    except KeyboardInterrupt:
        from skyctl import output

        if hint := job_hint():
            output.warn(hint)
        raise
