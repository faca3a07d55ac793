"""`skyctl urls`: where to send requests, as people, shells, trainers and Prometheus read it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.fleet.registry import FleetRef
    from skyctl.operations.urls import FleetUrls


class FormatOption(StrEnum):
    """Programs whose configuration can be printed."""

    SKYRL = "skyrl"
    VERL = "verl"
    PRIME_RL = "prime-rl"
    OPENAI = "openai"
    ENV = "env"


def urls(
    file: FileOption = None,
    fleet: FleetOption = None,
    format: Annotated[
        FormatOption | None,
        typer.Option(
            "--format",
            help="Print what this program's configuration needs to use the fleet.",
            show_default=False,
        ),
    ] = None,
    export: Annotated[
        bool, typer.Option("--export", help="Print shell exports: short for --format env.")
    ] = False,
    prometheus_sd: Annotated[
        Path | None,
        typer.Option(
            "--prometheus-sd",
            metavar="FILE",
            help="Write Prometheus service discovery (file_sd, .json) for servers and router.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the router's URL and every server's.

    \b
    Examples:
      skyctl urls
      eval "$(skyctl urls --format env)"       # sets OPENAI_BASE_URL among others
      skyctl urls --json | jq -r .data.router
      python -m skyrl.train.entrypoints.main_base $(skyctl urls --format skyrl) …
      skyctl urls --format prime-rl > fleet.toml && rl @ rl.toml @ fleet.toml
      skyctl urls --prometheus-sd /etc/prometheus/targets/fleet.json
    """
    import asyncio

    from rich.text import Text

    from skyctl import output
    from skyctl.errors import UsageError
    from skyctl.fleet.registry import select
    from skyctl.operations.formats import FORMATS, note

    if export and format not in (None, FormatOption.ENV):
        raise UsageError("--export is short for --format env: give one of them")
    chosen = FormatOption.ENV if export else format
    found = asyncio.run(_urls(select(file, fleet)))
    data = found.to_json()
    if prometheus_sd is not None:
        data["prometheus_sd"] = _write(found, prometheus_sd)
        if chosen is None:
            output.emit(data)
            return
    if chosen is None:
        output.emit(data, Text(_lines(found)))
        return
    text = FORMATS[chosen.value](found)
    if advice := note(chosen.value):
        output.note(advice)
    output.emit({**data, "format": chosen.value, "text": text}, Text(text))


async def _urls(ref: FleetRef) -> FleetUrls:
    from skyctl.operations.connect import connect

    async with connect(ref) as fleet:
        return await fleet.urls()


def _lines(found: FleetUrls) -> str:
    """One name and URL per line: plain, for a table would shorten them in a narrow terminal."""
    rows = [("router", found.router)] if found.router else []
    rows += found.servers.items()
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {url}" for name, url in rows)


def _write(found: FleetUrls, path: Path) -> str:
    """Write the service discovery and say so; the file's absolute path."""
    from skyctl import output
    from skyctl.operations.prometheus import write_targets

    count = write_targets(found, path)
    output.note(f"{count} targets in {path}")
    if found.router and found.router_metrics is None:
        output.note("the router is not among them: where its metrics are is not known")
    return str(path.absolute())
