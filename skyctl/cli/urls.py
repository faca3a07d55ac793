"""`skyctl urls`: where to send requests, in the formats of shells, trainers and Prometheus."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.core.registry import FleetRef, find, select
from skyctl.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef, RemoteRef
    from skyctl.core.urls import FleetUrls


OUTPUT = "What is printed"  # a panel of --help


class Format(StrEnum):
    """Programs whose configuration can be printed."""

    SKYRL = "skyrl"
    PRIME_RL = "prime-rl"
    OPENAI = "openai"
    ENV = "env"
    TINKER = "tinker"
    TRAINER = "trainer"


FormatOption = Annotated[
    Format | None,
    typer.Option(
        metavar="PROGRAM",
        help=f"What its configuration needs: {', '.join(Format)}.",
        rich_help_panel=OUTPUT,
    ),
]
ExportOption = Annotated[
    bool,
    typer.Option("--export", help="Short for --format env.", rich_help_panel=OUTPUT),
]
PrometheusSdOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write Prometheus service discovery (file_sd, .json).",
        rich_help_panel=OUTPUT,
    ),
]
ShowKeyOption = Annotated[
    bool,
    typer.Option("--show-key", help="The API key alone.", rich_help_panel=OUTPUT),
]


def urls(
    file: FileOption = None,
    fleet: FleetOption = None,
    format: FormatOption = None,
    export: ExportOption = False,
    prometheus_sd: PrometheusSdOption = None,
    show_key: ShowKeyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the router's URL and every server's, and where their keys are.

    Keys are named; only --show-key prints one.

    \b
    Examples:
      skyctl urls
      eval "$(skyctl urls --format env)"       # sets OPENAI_BASE_URL among others
      skyctl urls --json | jq -r .data.router
      curl -H "Authorization: Bearer $(skyctl urls --show-key)" $URL/v1/models
      python -m skyrl.train.entrypoints.main_base $(skyctl urls --format skyrl) …
      skyctl urls --format prime-rl > fleet.toml && rl @ rl.toml @ fleet.toml
      eval "$(skyctl urls --format tinker)"    # TINKER_BASE_URL and its key
      eval "$(skyctl urls --format trainer)"   # SKYCTL_FLEET_URL, for trainers
      skyctl urls --prometheus-sd /etc/prometheus/targets/fleet.json
    """
    from skyctl.core.urls import tinker_place

    if export and format not in (None, Format.ENV):
        raise UsageError("--export is short for --format env: give one of them")
    if show_key and (export or format or prometheus_sd):
        raise UsageError("--show-key prints the key alone: give no other format with it")
    chosen = Format.ENV if export else format
    if show_key:
        key = _key(select(file, fleet))
        output.emit({"api_key": key}, Text(key))
        return
    if chosen is Format.TINKER:
        place = tinker_place(select(file, fleet))
        data = {"url": place.url, "key_file": str(place.key_file)}
        output.emit({**data, "format": chosen.value, "text": place.as_env()}, Text(place.as_env()))
        return
    _emit_urls(find(file, fleet), chosen, prometheus_sd)


def _emit_urls(
    ref: FleetRef | RemoteRef, chosen: Format | None, prometheus_sd: Path | None
) -> None:
    from skyctl.cli.fleet_calls import in_loop
    from skyctl.core.urls import FORMATS, notes, refused_rollouts

    fleet_urls, refused = in_loop(_urls(ref, rollouts=chosen is Format.SKYRL))
    data = fleet_urls.to_json()
    if prometheus_sd is not None:
        data["prometheus_sd"] = _write(fleet_urls, prometheus_sd)
        if chosen is None:
            output.emit(data)
            return
    if chosen is None:
        output.emit(data, Text(_lines(fleet_urls)))
        _note_keys(fleet_urls)
        return
    text = FORMATS[chosen.value](fleet_urls)
    if warning := refused_rollouts(refused, attached=isinstance(ref, FleetRef) and ref.attached):
        output.warn(warning)
    for advice in notes(chosen.value, fleet_urls):
        output.note(advice)
    output.emit({**data, "format": chosen.value, "text": text}, Text(text))


async def _urls(ref: FleetRef | RemoteRef, *, rollouts: bool) -> tuple[FleetUrls, list[str]]:
    """Where the fleet is, and with `rollouts` the servers that would refuse SkyRL's."""
    from skyctl.http.client import ControlClient
    from skyctl.service import connect
    from skyctl.service.endpoint import without_token_route

    async with connect(ref) as fleet:
        if not rollouts:
            return await fleet.urls(), []
        async with ControlClient() as client:
            return await fleet.urls(), await without_token_route(fleet, client)


def _key(ref: FleetRef) -> str:
    """The inference key. Raises NotFoundError if there is none."""
    from skyctl.core.urls import access, api_key

    key = api_key(access(ref.config, ref.paths))
    if key is None:
        raise NotFoundError(
            f"fleet {ref.name} has no API key here",
            hint="it is made by: skyctl up; or export the variable that `api_key_env` names",
        )
    return key


def _note_keys(urls: FleetUrls) -> None:
    """Say where the keys are. On stderr, so that the URLs can be piped."""
    access = urls.access
    if where := access.api_key_file or (access.api_key_env and f"${access.api_key_env}"):
        output.note(f"requests need the API key in {where}")
    token = access.control_token_env
    if where := access.control_token_file or (token and f"${token}"):
        output.note(f"control routes need the token in {where}")


def _lines(urls: FleetUrls) -> str:
    """One name and URL per line: plain text, because a table would truncate them in a narrow
    terminal.
    """
    rows = [("router", urls.router)] if urls.router else []
    rows += [("trainer", urls.trainer)] if urls.trainer else []
    rows += urls.servers.items()
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {url}" for name, url in rows)


def _write(urls: FleetUrls, path: Path) -> str:
    """Write the service discovery file and say so; returns its absolute path."""
    from skyctl.core.urls import write_targets

    count = write_targets(urls, path)
    output.note(f"{count} targets in {path}")
    if where := urls.access.api_key_file or urls.access.api_key_env:
        output.note(
            f"scrape servers with `authorization: {{credentials_file: …}}`, a copy of {where}"
        )
    if urls.router and urls.router_metrics is None:
        output.note("the router is not among them: where its metrics are is not known")
    return str(path.absolute())
