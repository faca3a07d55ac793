"""`skyctl events`: the history of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli.fleet_calls import call_chosen_fleet
from skyctl.cli.options import LINES, FileOption, FleetOption, JsonOption, SinceOption, moment
from skyctl.core.requests import ALL_LINES, EventQuery
from skyctl.errors import UsageError

if TYPE_CHECKING:
    from skyctl.service import FleetService
    from skyctl.store.state import Event

_POLL_S = 0.5


def events(
    file: FileOption = None,
    fleet: FleetOption = None,
    follow: Annotated[bool, typer.Option("-F", "--follow", help="Follow until Ctrl-C.")] = False,
    since: SinceOption = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--lines",
            min=0,
            help="The latest lines (default: 100, or --since).",
            rich_help_panel=LINES,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened in the fleet, newest last: starts, deaths, pauses, pushes, repairs.

    \b
    Examples:
      skyctl events
      skyctl events --since 10m
      skyctl events --since 2026-01-31T18:00 --json | jq .data.events
      skyctl events --follow
    """
    if follow and as_json:
        raise UsageError("--follow and --json do not go together")
    limit = lines if lines is not None else ALL_LINES if since else 100
    query = EventQuery(limit, since=moment("--since", since) or 0.0)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):  # the usual way out
            call_chosen_fleet(file, fleet, lambda running: _follow(running, query))
        return
    listed = call_chosen_fleet(file, fleet, lambda running: running.events(query))
    views = event_lines(listed, dated=True) or [
        Text("no events since then" if since else "no events yet")
    ]
    output.emit({"events": [asdict(event) for event in listed]}, *views)


def event_lines(events: Sequence[Event], *, dated: bool = False) -> list[Text]:
    """One line each: when, whose, and what happened."""
    when = "%Y-%m-%d %H:%M:%S  " if dated else "%H:%M:%S  "
    width = max((len(event.subject) for event in events), default=0)
    return [
        Text.assemble(
            (time.strftime(when, time.localtime(event.at)), "dim"),
            (f"{event.subject:<{width}}  ", "cyan"),
            " ".join(event.message.split()),
        )
        for event in events
    ]


async def _follow(running: FleetService, query: EventQuery) -> None:
    """Print the events, then each new one; never returns."""
    async for listed in followed(running, query):
        for line in event_lines(listed, dated=True):
            output.out.print(line, soft_wrap=True)


async def followed(
    running: FleetService, query: EventQuery, *, poll_s: float = _POLL_S
) -> AsyncIterator[Sequence[Event]]:
    """The events of the query, then again and again all that are new, however many; endless."""
    listed = await running.events(replace(query, limit=max(1, query.limit)))
    yield listed if query.limit else ()  # of none, the last is read: it says which are new
    while True:
        after = listed[-1].sequence if listed else query.after
        query = replace(query, limit=ALL_LINES, after=after)
        await asyncio.sleep(poll_s)
        yield (listed := await running.events(query))
