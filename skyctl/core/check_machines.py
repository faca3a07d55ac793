"""Do other machines have what a plan needs? They are asked before anything is spawned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import locate
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.engines import ENGINES
from skyctl.errors import PreflightError, SkyctlError
from skyctl.launch.base import Node
from skyctl.launch.remote.machines import answers, by_machine
from skyctl.push.request import PushRequest
from skyctl.store.paths import FleetPaths


def check_machines(plan: FleetPlan, own_ports: Collection[int]) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to change, for each machine that is to have a server."""
    servers = _by_node(plan)
    if not servers:
        return
    engine = ENGINES[plan.config.engine]
    modules = engine.modules(plan.device, False, plan.servers[0].backend, False)
    paths = [plan.model_path] if Path(plan.model_path).is_absolute() else []
    questions = []
    for here in servers.values():
        used = [port for server in here for port in (server.port, server.master_port)]
        ports = [port for port in used if port and port not in own_ports]
        questions.append({"ports": 0, "modules": list(modules), "paths": paths, "listening": ports})
    versions: dict[str, dict[str, str]] = {}
    for node, answer in by_machine(list(servers), answers(list(servers), questions)):
        if isinstance(answer, SkyctlError):
            yield answer.message, answer.hint
            continue
        for module, version in answer.get("versions", {}).items():
            versions.setdefault(module, {})[node.target] = version
        for module in answer["missing"]:
            yield f"{node.target}: {node.python} has no {module}", "install it there"
        for path in answer["absent"]:
            yield (
                f"{node.target} has no {path}",
                "every machine reads the model itself: give `model` a path that all of them share",
            )
        for port, holder in answer["taken"].items():
            yield (
                f"{node.target}: port {port} is taken by {holder}",
                "stop it, or change `ports`, or leave it out for a free port",
            )
        gpus = {gpu["index"] for gpu in answer["gpus"]}
        for server in servers.get(node, ()):
            for index in sorted(set(server.gpus) - gpus):
                yield f"{node.target} has no GPU {index}", "correct `gpus`"
        yield from _without_room(node, answer, servers.get(node, ()))
    for module, found in versions.items():
        if len(set(found.values())) > 1:
            told = ", ".join(f"{target} {version}" for target, version in found.items())
            yield f"machines have different versions of {module}: {told}", "install one version"


def _without_room(
    node: Node, facts: Mapping[str, Any], servers: Sequence[ServerSpec]
) -> Iterator[tuple[str, str]]:
    """What no node of a cluster could carry, were it empty."""
    if node.ray is None or "room" not in facts:
        return
    need, what, room = node.ray.count, node.ray.resource, facts["room"]
    if need > max(room):
        yield (
            f"{servers[0].name} needs {need} {what}, and no node of the Ray cluster has more than "
            f"{max(room)}",
            "a replica runs on one node: lower its parallel sizes",
        )
    elif len(servers) > sum(one // need for one in room):
        yield (
            f"{len(servers)} servers of {need} {what} each are more than the Ray cluster's nodes "
            f"carry ({', '.join(map(str, room))})",
            "lower `replicas`, add nodes, or `ray: {head: true}`",
        )


def refuse_unseen(plan: FleetPlan, asked: PushRequest, paths: FleetPaths) -> None:
    """Refuse a push of what some machine does not have at its path: the checkpoint, or the copy of
    it that is to be kept.

    Raises:
        PreflightError: one lacks it, or cannot be asked.
    """
    nodes, found = list(_by_node(plan)), locate(asked.checkpoint)
    hint = "push from a path that all machines of the fleet share"
    if asked.keep:
        found = paths.directory
        hint = "push without --keep, or set SKYCTL_HOME to a directory that all machines share"
    if found is None:  # the push itself says that there is none
        return
    questions = [{"ports": 0, "paths": [str(found)]} for _ in nodes]
    for node, answer in by_machine(nodes, answers(nodes, questions)):
        if isinstance(answer, SkyctlError):
            raise PreflightError(answer.message, hint=answer.hint)
        if answer.get("absent"):
            raise PreflightError(f"{node.target} has no {found}", hint=hint)


def _by_node(plan: FleetPlan) -> dict[Node, list[ServerSpec]]:
    """The servers of each machine; a follower as the server that it is a part of, with its GPUs."""
    servers: dict[Node, list[ServerSpec]] = {}
    for server in plan.servers:
        if server.node is not None:
            servers.setdefault(server.node, []).append(server)
        for one in server.followers:
            part = replace(server, node=one.node, gpus=one.gpus, port=0, master_port=0)
            servers.setdefault(one.node, []).append(part)
    return servers
