"""`skyctl tinker`: an API for the tinker SDK beside a fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from skyctl.cli.asking import chosen
from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef

app = typer.Typer(help="The Tinker API: the tinker SDK trains adapters, the fleet samples them.")


@app.callback()
def tinker(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """The Tinker API: the tinker SDK trains adapters, the fleet samples them."""
    context.obj = (file, fleet)


@app.command()
def serve(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Serve the Tinker API of a running fleet until Ctrl-C.

    The fleet file has a section `tinker:`. A training process is started beside it. What clients
    were promised is on disk: after a crash, start it again, and they go on.

    \b
    skyctl tinker serve
    skyctl tinker serve --fleet demo
    eval "$(skyctl urls --format tinker)"     what a client needs, in another terminal
    """
    import asyncio

    from skyctl.core.registry import select

    asyncio.run(_serve(select(*chosen(context, file, fleet))))


async def _serve(ref: FleetRef) -> None:
    from rich.text import Text

    from skyctl import output
    from skyctl.tinker.place import place_of, serve_beside

    where = place_of(ref)
    output.note(
        f"the Tinker API of fleet {ref.name}; what clients need: skyctl urls --format tinker"
    )
    await serve_beside(ref)
    output.emit({"url": where.url, "key_file": str(where.key_file)}, Text(f"{where.url} is closed"))
