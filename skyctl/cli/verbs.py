"""What pause, resume, sleep and wake share: one call to the fleet, one table, one exit code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli import complete

if TYPE_CHECKING:
    from skyctl.core.service import Control, Outcomes

ServerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="NAME",
        help="Only this server; repeat for several (default: all).",
        show_default=False,
        autocompletion=complete.replicas,
    ),
]


def run_verb(
    file: Path | None,
    fleet: str | None,
    asked: Control,
    *,
    done: str,
    note: str = "",
) -> None:
    """Call every server, then print the outcomes and a line such as `paused 2 of 2 servers …`.

    Ends the process with 3 when some servers failed, 1 when all did, 124 when all timed out.
    """
    from skyctl import output
    from skyctl.core.registry import find
    from skyctl.http.fanout import failure
    from skyctl.service.connect import connect

    ref = find(file, fleet)

    async def ask() -> Outcomes:
        async with connect(ref) as running:
            return await running.control(asked)

    outcomes = asyncio.run(ask())
    rows = [outcome.to_json() for outcome in outcomes]
    ok = sum(row["status"] == "ok" for row in rows)
    elapsed_ms = max((row["elapsed_ms"] for row in rows), default=0.0)
    footer = f"{done} {ok} of {len(rows)} servers in {elapsed_ms:.0f} ms"
    output.emit(
        {"outcomes": rows, "done": ok, "servers": len(rows), "elapsed_ms": elapsed_ms},
        output.outcome_table(rows),
        f"{footer} ({note})" if note else footer,
        error=failure(outcomes, asked.verb),
    )
