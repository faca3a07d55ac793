"""Do the machines of `launcher: ssh` have what a plan needs? Asked before anything is spawned."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from skyctl.checkpoints.checkpoint import locate
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.engines import ENGINES
from skyctl.errors import PreflightError, SkyctlError
from skyctl.launch.base import Node
from skyctl.launch.ssh.machines import answers
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
        ports = [server.port for server in here if server.port not in own_ports]
        questions.append({"ports": 0, "modules": list(modules), "paths": paths, "listening": ports})
    for node, answer in zip(servers, answers(list(servers), questions), strict=True):
        if isinstance(answer, SkyctlError):
            yield answer.message, answer.hint
            continue
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
        for server in servers[node]:
            for index in sorted(set(server.gpus) - gpus):
                yield f"{node.target} has no GPU {index}", "correct `gpus`"


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
    for node, answer in zip(nodes, answers(nodes, questions), strict=True):
        if isinstance(answer, SkyctlError):
            raise PreflightError(answer.message, hint=answer.hint)
        if answer["absent"]:
            raise PreflightError(f"{node.target} has no {found}", hint=hint)


def _by_node(plan: FleetPlan) -> dict[Node, list[ServerSpec]]:
    servers: dict[Node, list[ServerSpec]] = {}
    for server in plan.servers:
        if server.node is not None:
            servers.setdefault(server.node, []).append(server)
    return servers
