"""The machines of a fleet file's `ssh:`, or the cluster of its `ray:`, asked for what they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyctl import __version__
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import Cpu, Gpu, Machine, Node
from skyctl.launch.remote.session import FACTS_TIMEOUT_S, another_version, ask
from skyctl.store.paths import create_private_file, private_directory

_CLUSTER_TIMEOUT_S = 90.0


def read_machines(
    nodes: Sequence[Node], *, ports: int, cache: Path, running: bool
) -> list[Machine]:
    """What each node has, and its address. `cache` keeps it for a fleet that is `running`: to plan
    that again, a node need not answer, unless it is asked for a port (`next_port` raises).

    Raises:
        HostUnreachable: some node cannot be asked; every one is named.
    """
    replies = answers(nodes, [{"ports": ports}] * len(nodes))
    kept: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(cache.read_text())
    facts: list[dict[str, Any]] = []
    lost: list[SkyctlError] = []
    silent: dict[Node, SkyctlError] = {}
    for node, answer in zip(nodes, replies, strict=True):
        if isinstance(answer, dict):
            facts.append(answer)
        elif running and node.target in kept:
            facts.append({**kept[node.target], "ports": []})
            silent[node] = answer
        else:
            lost.append(answer)
    if lost:
        raise HostUnreachable("; ".join(error.message for error in lost), hint=lost[0].hint)
    by_target = {node.target: of_node for node, of_node in zip(nodes, facts, strict=True)}
    with contextlib.suppress(OSError, SkyctlError):  # it only spares a question later
        private_directory(cache.parent)
        cache.unlink(missing_ok=True)
        with os.fdopen(create_private_file(cache), "w") as file:
            json.dump(by_target, file)
    pairs = zip(nodes, facts, strict=True)
    return [_machine(node, of_node, silent.get(node)) for node, of_node in pairs]


def answers(
    nodes: Sequence[Node], questions: Sequence[dict[str, Any]]
) -> list[dict[str, Any] | SkyctlError]:
    """What each node answers to its question for facts, or why it does not."""

    async def ask_node(node: Node, question: dict[str, Any]) -> dict[str, Any] | SkyctlError:
        try:
            patience_s = _CLUSTER_TIMEOUT_S if node.ray else FACTS_TIMEOUT_S
            answer = await ask(node, {"do": "facts", **question}, patience_s)
        except SkyctlError as error:
            return error
        if answer["skyctl"] != __version__:
            return another_version(node, answer["skyctl"])
        return answer

    async def every() -> list[dict[str, Any] | SkyctlError]:
        pairs = zip(nodes, questions, strict=True)
        return await asyncio.gather(*(ask_node(node, question) for node, question in pairs))

    # in a loop of its own: plans are made within one that runs, and outside of any
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, every()).result()


def by_machine(
    nodes: Sequence[Node], answers: Sequence[dict[str, Any] | SkyctlError]
) -> Iterator[tuple[Node, dict[str, Any] | SkyctlError]]:
    """The same, and after a cluster's answer that of each of its nodes."""
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, SkyctlError) or "nodes" not in answer:
            yield node, answer
            continue
        yield node, {**answer, "missing": [], "absent": [], "taken": {}}
        for address, facts in answer["nodes"].items():
            member = replace(node, target=address, address=address)
            if "error" in facts:
                yield member, HostUnreachable(facts["error"], hint="ray status")
            elif facts["skyctl"] != __version__:
                yield member, another_version(member, facts["skyctl"])
            else:
                yield member, {**facts, "taken": {}}


def _machine(node: Node, facts: dict[str, Any], silent: SkyctlError | None) -> Machine:
    ports = iter(facts["ports"])

    def next_port() -> int:
        if silent is not None:
            raise silent
        return next(ports, 0)

    return Machine(
        node=replace(node, address=facts["address"]),
        gpus=tuple(Gpu(**gpu) for gpu in facts["gpus"]),
        cpus=tuple(Cpu(**cpu) for cpu in facts["cpus"]),
        next_port=next_port,
        interface=facts.get("interface", ""),
    )
