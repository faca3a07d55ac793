"""`skyctl weights`: the weights on each server, and the pushes that brought them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyctl import output
from skyctl.cli.fleet_calls import call_chosen_fleet, chosen
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.errors import PartialFailure, SkyctlError
from skyctl.push.request import live_source
from skyctl.units import format_ago, format_bytes, format_seconds

if TYPE_CHECKING:
    from skyctl.core.results import WeightsState
    from skyctl.errors import SkyctlError
    from skyctl.service import FleetService
    from skyctl.store.adapters import AdapterVersion
    from skyctl.store.state import ServerRow
    from skyctl.tables import Table

app = typer.Typer(help="Weight version per server, history of pushes, and verification.")

_SHOWN = 5


@app.callback(invoke_without_command=True)
def weights(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Weight version per server and the latest pushes.

    \b
    skyctl weights
    skyctl weights verify
    skyctl weights history
    """
    if context.invoked_subcommand is not None:
        context.obj = (file, fleet)
        return

    async def read_state(running: FleetService) -> tuple[WeightsState, tuple[AdapterVersion, ...]]:
        return await running.weights(), await running.adapters()

    weights_state, adapters = call_chosen_fleet(file, fleet, read_state)
    servers, pushes = weights_state.servers, weights_state.pushes
    output.emit(
        {
            "version": weights_state.version,
            "servers": [
                {
                    "server": row.name,
                    "version": row.weight_version,
                    "checkpoint": row.checkpoint,
                    "weights_digest": row.weights_digest,
                    "quarantine": row.quarantine,
                }
                for row in servers
            ],
            "pushes": [push.to_json() for push in pushes],
            "adapters": [adapter.to_json() for adapter in adapters],
        },
        servers_table(servers) if servers else "no server runs",
        *(["", "adapters: " + ", ".join(map(_adapter, adapters))] if adapters else []),
        *(["", _history(pushes[:_SHOWN])] if pushes else []),
    )


def servers_table(servers: Sequence[ServerRow]) -> Table:
    """The weights on record of each server, and why it is quarantined."""
    rows = [
        [
            row.name,
            row.weight_version or "(as started)",
            (row.weights_digest or "")[:12] or None,
            row.checkpoint,
            output.styled(f"quarantined: {row.quarantine}") if row.quarantine else "",
        ]
        for row in servers
    ]
    return output.table(["SERVER", "VERSION", "WEIGHTS", "~CHECKPOINT", "~"], rows)


def _adapter(adapter: AdapterVersion) -> str:
    servers = ", ".join(adapter.servers) or "no server yet"
    return f"{adapter.served_as} ({adapter.digest[:12]}) on {servers}"


@app.command()
def history(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw freeze windows and rates as bars, oldest first.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Every push of the fleet, newest first.

    \b
    skyctl weights history --plot
    skyctl weights history --json
    """
    from skyctl.cli.bars_view import history_plot

    pushes = call_chosen_fleet(
        *chosen(context, file, fleet), lambda running: running.weights()
    ).pushes
    show = history_plot if plot else _history
    output.emit(
        {"pushes": [push.to_json() for push in pushes]},
        show(pushes) if pushes else "no pushes yet",
    )


@app.command()
def verify(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Ask every server for a digest of the weights it computes with, and compare them: with each
    other, with what is on record, and with the checkpoint while it is as it was pushed.

    \b
    skyctl weights verify
    """
    verification = call_chosen_fleet(
        *chosen(context, file, fleet), lambda running: running.verify_weights()
    )
    report = verification.to_json()
    servers = report["servers"]
    error = _disagreement(report)
    rows = [
        [row["server"], row["version"], row["digest"][:12] or None, row["detail"]]
        for row in servers
    ]
    output.emit(
        report,
        output.table(["SERVER", "VERSION", "WEIGHTS", "~DETAIL"], rows),
        None if error else _agreement(servers),
        error=error,
    )


def _disagreement(report: Mapping[str, Any]) -> SkyctlError | None:
    """The error of a verification in which servers differ or do not answer."""
    servers = report["servers"]
    silent = [row["server"] for row in servers if not row["ok"]]
    if silent:
        reason = next(row["detail"] for row in servers if not row["ok"])
        return PartialFailure(
            f"{', '.join(silent)} could not be verified: {reason}", hint="skyctl status"
        )
    if unlike := [row for row in servers if row["as_recorded"] is False]:
        return SkyctlError(
            f"{unlike[0]['server']}: {unlike[0]['detail']}",
            hint="another program may push to it; push again: skyctl sync-weights CKPT",
        )
    if report["agree"] is False:
        return SkyctlError(
            "the servers hold different weights", hint="push again: skyctl sync-weights CKPT"
        )
    # those of a canary are labelled otherwise, as recorded
    intended = report["agree"] and all(row["as_recorded"] for row in servers)
    if len({row["version"] for row in servers if row["ok"]}) > 1 and not intended:
        return SkyctlError("the servers are labelled with different versions")
    if report["agree"] is None:
        return SkyctlError("the servers cannot digest their weights: nothing was compared")
    return None


@app.command()
def kept(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Versions of which the fleet keeps a copy of its own (`sync-weights --keep`).

    They stay until they are forgotten: through restarts, `down`, and a trainer that deletes or
    overwrites its directories. `skyctl sync-weights --rollback VERSION` pushes one.

    \b
    skyctl weights kept
    skyctl weights forget step-100
    """
    versions = call_chosen_fleet(
        *chosen(context, file, fleet), lambda running: running.kept_versions()
    )
    rows = [
        [
            version.kept.version,
            format_bytes(version.kept.bytes),
            format_ago(version.kept.at),
            version.kept.source,
            output.styled("current")
            if version.current
            else ("" if version.exists else "its copy is gone"),
        ]
        for version in versions
    ]
    output.emit(
        {"kept": [version.to_json() for version in versions]},
        output.table(["VERSION", ">SIZE", ">WHEN", "~FROM", ""], rows)
        if rows
        else "nothing is kept (skyctl sync-weights CKPT --keep)",
    )


@app.command()
def save(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    file: FileOption = None,
    fleet: FleetOption = None,
    version: Annotated[
        str, typer.Option(metavar="VERSION", help="Refuse unless the fleet serves this version.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Write what the servers run into a Hugging Face checkpoint, also what is in no file.

    One server on this machine writes it, a few tensors at a time, and serves in between. Pushes are
    refused meanwhile.

    \b
    skyctl weights save checkpoints/step-12
    skyctl weights save checkpoints/step-12 --version step-12
    """
    from skyctl.core.requests import SaveWeights

    request = SaveWeights(str(directory.absolute()), version)
    saved = call_chosen_fleet(
        *chosen(context, file, fleet), lambda running: running.save_weights(request)
    )
    label = saved.version or "what the servers were started with"
    message = f"saved {label} to {directory}: {format_bytes(saved.total_bytes)}"
    output.emit(saved.to_json(), f"{message} in {format_seconds(saved.seconds)}")


@app.command()
def rendezvous(
    context: typer.Context,
    file: FileOption = None,
    fleet: FleetOption = None,
    master_address: Annotated[
        str | None, typer.Option(help="Where the trainer will listen; this machine if not given.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Its port; one that is free here if not given."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """What a trainer that sends weights itself must know of each server. Changes nothing.

    The trainer has rank 0 in one group with the workers of all servers. It sends within
    `Fleet.update` (docs/trainers.md), which freezes the fleet, verifies, and undoes.

    \b
    skyctl weights rendezvous --json
    """
    from skyctl.push.trainer import Rendezvous, SendTarget, suggest

    async def plan_rendezvous(running: FleetService) -> tuple[Rendezvous, tuple[SendTarget, ...]]:
        at = suggest((await running.urls()).servers.values())
        if master_address is not None:
            at = replace(at, master_address=master_address)
        if master_port is not None:
            at = replace(at, master_port=master_port)
        return at, await running.rendezvous(at)

    at, targets = call_chosen_fleet(*chosen(context, file, fleet), plan_rendezvous)
    rows = [
        [target.server, target.url, target.backend, str(target.rank_offset), str(target.workers)]
        for target in targets
    ]
    output.emit(
        {
            "master_address": at.master_address,
            "master_port": at.master_port,
            "world_size": targets[0].world_size,
            "servers": [target.to_json() for target in targets],
        },
        output.table(["SERVER", "URL", "BACKEND", ">RANK OFFSET", ">WORKERS"], rows),
        f"world size {targets[0].world_size}; the trainer is rank 0, for example at "
        f"{at.master_address}:{at.master_port}",
    )


@app.command()
def forget(
    context: typer.Context,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="As `weights kept` shows it.")],
    file: FileOption = None,
    fleet: FleetOption = None,
    json: JsonOption = False,
) -> None:
    """Delete the fleet's own copy of a version. The one that the fleet runs is refused.

    \b
    skyctl weights forget step-100
    """
    from skyctl.core.requests import Forget

    request = Forget(version)
    freed = call_chosen_fleet(
        *chosen(context, file, fleet), lambda running: running.forget_version(request)
    )
    message = f"forgot {version}: {format_bytes(freed)} deleted"
    output.emit({"version": version, "freed_bytes": freed}, message)


def _history(pushes: Any) -> Any:
    rows = []
    for push in pushes:
        result = push.result
        frozen = result.get("freeze_window_s")
        size = result.get("total_bytes")
        rows.append(
            [
                push.job,
                format_ago(push.at),
                output.styled("ok" if push.ok else "failed"),
                push.version,
                result.get("transport"),
                format_bytes(size) if size else None,
                format_seconds(frozen) if frozen else None,
                live_source(ranks) if (ranks := result.get("ranks")) else push.checkpoint,
            ]
        )
    columns = ["PUSH", ">WHEN", "RESULT", "VERSION", "TRANSPORT", ">SIZE", ">FROZEN", "~CHECKPOINT"]
    return output.table(columns, rows, spare=["TRANSPORT", "SIZE", "FROZEN"])


def _agreement(servers: Sequence[Mapping[str, Any]]) -> str:
    """What equal digests, records and rows prove."""
    from skyctl.push.verify import comparable

    groups = comparable([row["digest"] for row in servers], str)
    if len(servers) == 1:
        same = "there is one server, and none to compare it with"
    elif len({row["version"] for row in servers}) > 1:
        same = f"of {len(servers)} servers those of each version hold the same weights"
    elif len(groups) == 1:
        same = f"{len(servers)} servers hold the same weights"
    else:
        same = f"each of {len(servers)} servers agrees with those that hold the model the same way"
    if all(row["as_recorded"] for row in servers):
        same += "; all is as on record"
    compared = [row["compared"] for row in servers]
    if all(compared):
        least = min(sample["tensors"] for sample in compared)
        return f"{same}; rows of {least} tensors are the checkpoint's"
    return f"{same}; not compared with the checkpoint, which is gone or not the pushed one"
