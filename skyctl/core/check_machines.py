"""Check that other machines have what a plan needs, before anything is spawned."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyctl.checkpoints.checkpoint import locate
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.tinker import MODULES, TinkerSettings
from skyctl.engines import ENGINES
from skyctl.errors import PreflightError, SkyctlError
from skyctl.launch.base import Node
from skyctl.launch.remote.machines import answers, by_machine
from skyctl.push.request import PushRequest
from skyctl.store.paths import FleetPaths


def check_machines(plan: FleetPlan, own_ports: Collection[int]) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to change, for each machine that is to run a server."""
    servers = _by_node(plan)
    trainer = TinkerSettings.of_argument(plan.tinker.argv[-1]).node if plan.tinker else None
    if trainer is not None:
        servers.setdefault(trainer, [])
    if not servers:
        return
    engine = ENGINES[plan.config.engine]
    modules = engine.modules(plan.device, False, plan.servers[0].backend, False)
    paths = [plan.model_path] if Path(plan.model_path).is_absolute() else []
    try:
        # the copies will lie where its links lead now
        shared = plan.config.shared_dir and os.path.realpath(plan.config.shared_dir)
        with _written_to(shared) as written:
            questions = []
            for node, hosted in servers.items():
                used = [port for server in hosted for port in (server.port, server.master_port)]
                ports = [port for port in used if port and port not in own_ports]
                needed = [*modules, *(MODULES if node == trainer else ())]
                question = {"ports": 0, "modules": needed, "listening": ports}
                questions.append({**question, "paths": [*paths, *written]})
            answered = answers(list(servers), questions)
    except OSError as error:
        yield (
            f"shared_dir {plan.config.shared_dir} cannot be written here: {error.strerror}",
            "name a directory that this machine and all of the fleet's share",
        )
        return
    versions: dict[str, dict[str, str]] = {}
    for node, answer in by_machine(list(servers), answered):
        if isinstance(answer, SkyctlError):
            yield answer.message, answer.hint
            continue
        for module, version in answer.get("versions", {}).items():
            versions.setdefault(module, {})[node.target] = version
        yield from _wrong_on(node, answer, servers.get(node, ()), plan, written)
    for module, by_target in versions.items():
        if len(set(by_target.values())) > 1:
            listed = ", ".join(f"{target} {version}" for target, version in by_target.items())
            yield f"machines have different versions of {module}: {listed}", "install one version"


def _wrong_on(
    node: Node,
    facts: Mapping[str, Any],
    servers: Sequence[ServerSpec],
    plan: FleetPlan,
    written: Collection[str],
) -> Iterator[tuple[str, str]]:
    """What is wrong by the facts of one machine. `written`: what lies in shared_dir to be read."""
    for module in facts["missing"]:
        yield f"{node.target}: {node.python} has no {module}", "install it there"
    for path in facts["absent"]:
        if path in written:
            yield (
                f"{node.target} cannot read what is written to shared_dir "
                f"{plan.config.shared_dir} here",
                "name a directory that all machines share; its files are this user's alone",
            )
            continue
        yield (
            f"{node.target} has no {path}",
            "every machine reads the model itself: give `model` a path that all of them share",
        )
    for port, holder in facts["taken"].items():
        yield (
            f"{node.target}: port {port} is taken by {holder}",
            "stop it, or change `ports`, or leave it out for a free port",
        )
    gpus = {gpu["index"] for gpu in facts["gpus"]}
    for server in servers:
        for index in sorted(set(server.gpus) - gpus):
            yield f"{node.target} has no GPU {index}", "correct `gpus`"
    section = plan.config.tinker
    if section is not None and section.machine == node.target:
        for index in sorted({*section.gpus} - gpus):
            yield f"{node.target} has no GPU {index}", "correct `tinker: device`; cpu always works"
    yield from _without_room(node, facts, servers)


@contextmanager
def _written_to(directory: str | None) -> Iterator[list[str]]:
    """A file that lies there as the fleet's copies will, for as long as the block runs.

    Raises:
        OSError: it cannot be written.
    """
    if directory is None:
        yield []
        return
    with TemporaryDirectory(prefix=".skyctl-", dir=directory) as private:
        file = Path(private) / "seen"
        file.touch(mode=0o600)
        yield [str(file)]


def _without_room(
    node: Node, facts: Mapping[str, Any], servers: Sequence[ServerSpec]
) -> Iterator[tuple[str, str]]:
    """Servers that no node of a cluster could run even if it were empty."""
    if node.ray is None or "room" not in facts:
        return
    need, resource, room = node.ray.count, node.ray.resource, facts["room"]
    if need > max(room):
        yield (
            f"{servers[0].name} needs {need} {resource}, and no node of the Ray cluster has more "
            f"than {max(room)}",
            "a replica runs on one node: lower its parallel sizes",
        )
    elif len(servers) > sum(free // need for free in room):
        yield (
            f"{len(servers)} servers of {need} {resource} each are more than the Ray cluster's "
            f"nodes carry ({', '.join(map(str, room))})",
            "lower `replicas`, add nodes, or `ray: {head: true}`",
        )


def refuse_unseen(plan: FleetPlan, request: PushRequest, paths: FleetPaths) -> None:
    """Refuse a push of something that a machine does not have at its path: the checkpoint, or the
    copy of it that is to be kept.

    Raises:
        PreflightError: one lacks it, or cannot be asked.
    """
    nodes, path = list(_by_node(plan)), locate(request.checkpoint)
    hint = "push from a path that all machines of the fleet share"
    if request.keep:
        path = paths.shared or paths.directory
        hint = "push without --keep, or write a `shared_dir` into the fleet file"
    elif path is not None and paths.staging in path.parents:
        hint = "weights from memory need a `shared_dir` in the fleet file"
    if path is None:  # the push itself reports a missing checkpoint
        return
    questions = [{"ports": 0, "paths": [str(path)]} for _ in nodes]
    for node, answer in by_machine(nodes, answers(nodes, questions)):
        if isinstance(answer, SkyctlError):
            raise PreflightError(answer.message, hint=answer.hint)
        if answer.get("absent"):
            raise PreflightError(f"{node.target} has no {path}", hint=hint)


def _by_node(plan: FleetPlan) -> dict[Node, list[ServerSpec]]:
    """The servers of each machine; a follower as the server that it is a part of, with its GPUs."""
    servers: dict[Node, list[ServerSpec]] = {}
    for server in plan.servers:
        if server.node is not None:
            servers.setdefault(server.node, []).append(server)
        for follower in server.followers:
            part = replace(server, node=follower.node, gpus=follower.gpus, port=0, master_port=0)
            servers.setdefault(follower.node, []).append(part)
    return servers
