"""`skyctl urls`: where to send requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.fleet.registry import FleetRef


def urls(
    file: FileOption = None,
    fleet: FleetOption = None,
    export: Annotated[
        bool, typer.Option("--export", help="Print shell exports, for `eval` and scripts.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the router's URL and every server's.

    \b
    Examples:
      skyctl urls
      eval "$(skyctl urls --export)"      # sets OPENAI_BASE_URL among others
      skyctl urls --json | jq -r .data.router
    """
    import asyncio

    from rich.text import Text

    from skyctl import output
    from skyctl.fleet.registry import select

    found = asyncio.run(_urls(select(file, fleet)))
    if export:
        output.emit(found, Text("\n".join(_exports(found))))
        return
    rows = [("router", found["router"])] if found.get("router") else []
    rows += found["servers"].items()
    width = max(len(name) for name, _ in rows)
    # plain lines, not a table: a table would shorten URLs to fit a narrow terminal
    output.emit(found, Text("\n".join(f"{name:<{width}}  {url}" for name, url in rows)))


async def _urls(ref: FleetRef) -> dict[str, Any]:
    from skyctl.operations.connect import connect

    async with connect(ref) as fleet:
        return await fleet.urls()


def _exports(found: dict[str, Any]) -> list[str]:
    """Lines for a POSIX shell. Without a router, OPENAI_BASE_URL is the first server's."""
    import shlex

    servers = list(found["servers"].values())
    variables: dict[str, str] = {}
    if found.get("router"):
        variables["SKYCTL_ROUTER_URL"] = found["router"]
    if entry := found.get("router") or next(iter(servers), None):
        variables["OPENAI_BASE_URL"] = f"{entry}/v1"
    variables["SKYCTL_SERVER_URLS"] = ",".join(servers)
    if found.get("model"):
        variables["SKYCTL_MODEL"] = found["model"]
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
