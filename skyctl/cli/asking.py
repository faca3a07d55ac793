"""What read-only commands share: one question to one fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from skyctl.service import FleetService

T = TypeVar("T")


def chosen(
    context: typer.Context, file: Path | None, fleet: str | None
) -> tuple[Path | None, str | None]:
    """-f and --fleet as given after the subcommand, else before it."""
    outer: tuple[Path | None, str | None] = context.obj or (None, None)
    return (file, fleet) if file or fleet else outer


def ask_fleet(
    file: Path | None, fleet: str | None, call: Callable[[FleetService], Awaitable[T]]
) -> T:
    """One call to the chosen fleet, in an event loop of its own."""
    from skyctl.core.registry import find
    from skyctl.service.connect import connect

    ref = find(file, fleet)

    async def run() -> T:
        async with connect(ref) as running:
            return await call(running)

    return asyncio.run(run())
