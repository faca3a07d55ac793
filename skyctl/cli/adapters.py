"""`skyctl adapters`: LoRA adapters, loaded into the running servers without a freeze."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import call_chosen_fleet, call_fleet, chosen
from skyctl.cli.options import FileOption, FleetOption, JsonOption, TimeoutOption
from skyctl.cli.sources import stored_directory
from skyctl.core.registry import Files, FleetRef, find
from skyctl.store.paths import expanded
from skyctl.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from skyctl.adapters.fleet import AdapterChange
    from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
    from skyctl.core.registry import RemoteRef
    from skyctl.service import FleetService

app = typer.Typer(help="LoRA adapters: load, sync to a new version, unload, without a freeze.")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The model name that requests ask for.")
]
DirectoryArgument = Annotated[
    str,
    typer.Argument(metavar="DIR", help="What PEFT's save_pretrained wrote, or a tinker:// path."),
]
AnyBaseOption = Annotated[
    bool, typer.Option("--any-base", help="Whatever base model the adapter says it is of.")
]


@app.callback(invoke_without_command=True)
def adapters(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """The LoRA adapters that the fleet serves.

    \b
    skyctl adapters load math ./math-adapter      # requests use `model: math`
    skyctl adapters sync math ./math-adapter-2    # the next version
    skyctl adapters unload math
    """
    if context.invoked_subcommand is None:
        _show(file, fleet)
    else:
        context.obj = (file, fleet)


@app.command("list")
def list_(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Name, version and digest of each adapter, and the servers that have it.

    \b
    skyctl adapters list
    skyctl adapters list --json
    """
    _show(*chosen(context, file, fleet))


@app.command()
def load(
    context: typer.Context,
    name: NameArgument,
    directory: DirectoryArgument,
    any_base: AnyBaseOption = False,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Serve an adapter under a new name, on every server or on none.

    It is checked against the running model first, and copied: the directory may go or change
    afterwards. A server that restarts has it before it is routed.

    \b
    skyctl adapters load math ./math-adapter
    skyctl generate --model math "7 times 6 is"
    """
    _change(*chosen(context, file, fleet), name, directory, True, any_base, timeout)


@app.command()
def sync(
    context: typer.Context,
    name: NameArgument,
    directory: DirectoryArgument,
    any_base: AnyBaseOption = False,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Bring a served adapter to a new version, on every server or on none. Nothing is paused.

    Requests under way end with the version they began with; those that come after it use the new
    one, and their answers say which (`"model": "math@2"`).

    \b
    skyctl adapters sync math ./math-adapter-step-200
    """
    _change(*chosen(context, file, fleet), name, directory, False, any_base, timeout)


@app.command()
def unload(
    context: typer.Context,
    name: NameArgument,
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Serve an adapter no longer; requests under way end with it.

    \b
    skyctl adapters unload math
    """
    from skyctl.adapters.requests import UnloadAdapter

    request = UnloadAdapter(name=name, timeout_s=timeout)
    _carry_out(find(*chosen(context, file, fleet)), request)


def _change(
    file: Files,
    fleet: str | None,
    name: str,
    directory: str,
    new: bool,
    any_base: bool,
    timeout_s: float | None,
) -> None:
    from skyctl.adapters.requests import LoadAdapter

    ref = find(file, fleet)
    local = isinstance(ref, FleetRef)  # otherwise the path is on another machine
    request = LoadAdapter(
        name=name,
        directory=str(expanded(stored_directory(directory)).absolute()) if local else directory,
        new=new,
        any_base=any_base,
        timeout_s=timeout_s,
    )
    _carry_out(ref, request)


def _carry_out(ref: FleetRef | RemoteRef, request: LoadAdapter | UnloadAdapter) -> None:
    """Make the change and print it. Ctrl-C leaves it to the supervisor, where there is one."""
    from skyctl.adapters.requests import LoadAdapter
    from skyctl.cli.job_view import going_on

    def change(running: FleetService) -> Awaitable[AdapterChange]:
        if isinstance(request, LoadAdapter):
            return running.load_adapter(request)
        return running.unload_adapter(request)

    attached = isinstance(ref, FleetRef) and ref.attached
    hint = "" if attached else going_on(f"adapters-{request.name}")
    _report(call_fleet(ref, change, lambda: hint))


def _report(change: AdapterChange) -> None:
    rows = [outcome.to_json() for outcome in change.outcomes]
    done = sum(outcome.ok for outcome in change.outcomes)
    servers = f"{done} of {count_of(len(rows), 'server')} in {change.elapsed_ms:.0f} ms"
    adapter = change.adapter
    if adapter is None:
        line = f"{change.name} unloaded from {servers}"
    else:
        was = f" (was {change.before})" if change.before else ""
        line = (
            f"{change.name} is version {adapter.version}{was} on {servers}; rank {adapter.rank}, "
        )
        line += f"digest {adapter.digest[:12]}"
    output.emit(
        {
            "name": change.name,
            "version": adapter and adapter.version,
            "before": change.before,
            "adapter": adapter and adapter.to_json(),
            "outcomes": rows,
            "elapsed_ms": round(change.elapsed_ms, 1),
            "notes": list(change.notes),
        },
        output.outcome_table(rows),
        line,
        *change.notes,
    )


def _show(file: Files, fleet: str | None) -> None:
    adapters = call_chosen_fleet(file, fleet, lambda running: running.adapters())
    rows = [
        [
            adapter.name,
            str(adapter.version),
            str(adapter.rank),
            format_bytes(adapter.bytes),
            adapter.digest[:12],
            ", ".join(adapter.servers) or "no server yet",
            adapter.source,
        ]
        for adapter in adapters
    ]
    output.emit(
        {"adapters": [adapter.to_json() for adapter in adapters]},
        output.table(["ADAPTER", "VERSION", "RANK", "SIZE", "DIGEST", "~SERVERS", "~SOURCE"], rows)
        if rows
        else "no adapters are served",
    )
