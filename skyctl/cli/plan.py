"""`skyctl plan`: every process that `up` would start, to the last argument."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from skyctl import output
from skyctl.cli.fleet_file import FileArgument, chosen_fleet, kept
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.errors import SkyctlError
from skyctl.units import format_bytes

if TYPE_CHECKING:
    from rich.text import Text

    from skyctl.core.plan import FleetPlan
    from skyctl.core.registry import FleetRef
    from skyctl.supervisor.reconcile import Preview
    from skyctl.tables import Table


def plan(
    path: FileArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every process of the fleet file, and what `up` would change. Starts nothing.

    Of each process: command, environment, port, GPUs. If the fleet runs: what would start, restart
    and stop, with the settings that differ; `up --dry-run` prints only that. Ports that the file
    leaves open are free ones and may differ next time. Values of variables named like secrets are
    shown as ***.

    \b
    Examples:
      skyctl plan
      skyctl plan fleets/production.yaml --json | jq '.data.servers[].argv'
    """
    from skyctl.cli.change_view import change_lines
    from skyctl.core.planning import at_present, plan_here

    ref = chosen_fleet(path, file, fleet)
    if ref.attached:
        _emit_attached(ref)
        return
    ports, pins = kept(ref)
    config = at_present(ref.config, ports)
    planned = plan_here(config, ref.base_dir, known_ports=ports, pins=pins)
    for warning in planned.warnings:
        output.warn(warning)
    changes = _changes(ref, planned)
    data = {**planned.to_json(), "changes": changes.to_json() if changes else None}
    parts: list[Text | Table] = [_overview(planned), _table(planned), *_commands(planned)]
    if changes is not None and not changes.idle:
        parts += [Text("\n").join(change_lines(ref.name, changes))]
    output.emit(data, *parts)


def _changes(ref: FleetRef, planned: FleetPlan) -> Preview | None:
    """What `up` would do; None if what runs does not answer."""
    from skyctl.cli.fleet_calls import in_loop
    from skyctl.service.bring_up import preview_of

    try:
        return in_loop(preview_of(ref, planned))
    except SkyctlError as error:
        output.warn(f"not compared with what runs: {error.message}")
        return None


def _emit_attached(ref: FleetRef) -> None:
    from skyctl.cli.fleet_calls import in_loop
    from skyctl.service.discovery import locate

    urls = [url for _, url in in_loop(locate(ref))]
    router = ref.config.router if isinstance(ref.config.router, str) else None
    data: dict[str, Any] = {"name": ref.name, "attached": urls, "router": router, "servers": []}
    lines = [f"fleet {ref.name}: nothing to start, its servers run already", ""]
    lines += [f"  {url}" for url in urls]
    if router is not None:
        lines.append(f"  {router}  (router)")
    output.emit(data, Text("\n".join(lines)))


def _overview(planned: FleetPlan) -> Text:
    origin = ""
    if not Path(planned.model_path).is_absolute():
        pins = planned.pins.values()
        commit = next((pin for pin in pins if planned.base.endswith(f"@{pin}")), "")
        where = f"commit {commit[:12]} of the local cache" if commit else "the servers download it"
        origin = f"  (from the hub: {where})"
    rows = [
        ("fleet", planned.name),
        ("device", planned.device),
        ("model", planned.model_path + origin),
        ("served as", planned.served_model_name),
    ]
    if (scale := planned.config.scale) is not None:
        bounds = f"{len(planned.servers)} of {scale.min} to {scale.max} replicas"
        rows.append(("scale", f"{bounds}, by {scale.target}: {scale.per_replica:g} each"))
    if planned.free_gpus:
        rows.append(("free GPUs", ", ".join(str(gpu) for gpu in planned.free_gpus)))
    if planned.warm_sender["gpu_bytes"]:
        gpu, host = (format_bytes(planned.warm_sender[key]) for key in ("gpu_bytes", "host_bytes"))
        rows.append(("sender", f"waits for pushes: {gpu} on its GPUs, {host} of host memory"))
    text = Text()
    for label, value in rows:
        text.append(f"{label:<10}", "bold").append(f"{value}\n")
    return text


def _table(planned: FleetPlan) -> Table:
    rows: list[Sequence[Any]] = [
        [
            server.name,
            server.url,
            ",".join(str(gpu) for gpu in server.gpus) or None,
            server.world_size,
            server.backend or None,
            server.role or None,
            server.machines,
        ]
        for server in planned.servers
    ]
    if planned.router is not None:
        router = planned.router
        metrics = f"metrics on {router.metrics_port}"
        rows.append(["router", router.url, None, None, metrics, None, None])
    if planned.tinker is not None:
        rows.append(["tinker", planned.tinker.url, None, None, None, None, None])
    columns = ["PROCESS", "URL", "GPUS", ">WORKERS", "WEIGHT TRANSFER", "ROLE", "NODE"]
    servers = planned.servers
    tells = {"ROLE": any(s.role for s in servers), "NODE": any(s.node for s in servers)}
    shown = [index for index, name in enumerate(columns) if tells.get(name, True)]
    return output.table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _commands(planned: FleetPlan) -> list[Text]:
    from skyctl.engines import routing

    texts = []
    for server in planned.servers:
        process = server.to_json()
        texts.append(_command(server.name, process))
        followers = process["followers"]
        texts += [
            _command(f"{server.name} on {follower['node']}", follower) for follower in followers
        ]
    if planned.router is not None:
        roles = dict.fromkeys(server.role for server in planned.servers)
        urls = {role: ["…"] for role in roles}
        workers = routing(planned.config.engine).workers(urls, planned.router.argv)
        texts.append(_command("router", planned.router.to_json(), more=" ".join(workers)))
    if planned.tinker is not None:
        texts.append(_command("tinker", planned.tinker.to_json()))
    return texts


def _command(name: str, process: Mapping[str, Any], *, more: str = "") -> Text:
    """One process as a shell command, an argument with its values per line."""
    lines = [f"{key}={shlex.quote(value)}" for key, value in process["env"].items()]
    words: list[str] = []
    for argument in process["argv"]:
        if argument.startswith("--") and words:
            lines.append(" ".join(words))
            words = ["   "]
        words.append(shlex.quote(argument))
    lines.append(" ".join(words))
    if more:
        lines.append(f"    {more}")
    text = Text("\n").append(f"# {name}\n", "bold")
    return text.append(" \\\n".join(lines))
