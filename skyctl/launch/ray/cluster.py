"""A Ray cluster, treated as one machine: the resources of its nodes, and a node for each server.

Ray only reserves resources and starts agents. What a server needs is reserved in a placement group
of its own, which outlives every process of ours; the server belongs to its keeper
(`remote/agent.py`), so nothing that Ray ends takes it down.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import ADDRESS_AT_SPAWN, Node, RayCluster
from skyctl.launch.ray import worker
from skyctl.launch.ray.connection import LOOK, refuse_open
from skyctl.launch.remote.session import explained

WORKER_TIMEOUT_S = 25.0
_PINNED_S = 5.0
_THERE_S = 0.5
_CALLS = 128  # at once: one for each process that runs there, and a few
_LOOK_S = 1.0
_TURN_S = 0.05
_HEAD = "node:__internal_head__"
_NODE_LABEL = "ray.io/node-id"
_PREFIX = "skyctl-"


@contextlib.contextmanager
def _one_at_a_time(deadline: float) -> Iterator[None]:
    """Serialise choices, so that servers that start together see each other's. A name (Linux) that
    dies with its process is the lock; past the deadline a process chooses regardless.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        while time.monotonic() < deadline:
            try:
                claim.bind(f"\0skyctl-ray-{os.getuid()}")
            except OSError:
                time.sleep(_TURN_S)
                continue
            break
        yield


def _only_on(node: Mapping[str, Any]) -> Any:
    """The scheduling strategy that runs something on this node or not at all."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _refuse_abandoned(abandoned: threading.Event) -> None:
    if abandoned.is_set():
        raise SkyctlError("the process that a node was reserved for has ended")


class Workers:
    """An actor (`worker.Worker`) on each node that something was wanted of, from then on."""

    def __init__(self) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(worker)
        self._ray = ray
        self._lock = threading.Lock()
        self._on: dict[str, Any] = {}

    def on(self, node: Mapping[str, Any]) -> Any:
        """That of this node; a new one if the last is known to be dead."""
        from ray.exceptions import GetTimeoutError, RayActorError

        name = node["NodeID"]
        with self._lock:
            if (worker := self._on.get(name)) is not None:
                with contextlib.suppress(RayActorError):  # then it is dead
                    with contextlib.suppress(GetTimeoutError):  # that does not say so
                        self._ray.get(worker.ping.remote(), timeout=_THERE_S)
                    return worker
            self._on[name] = self.new(scheduling_strategy=_only_on(node))
            return self._on[name]

    def new(self, **options: Any) -> Any:
        """One for its caller alone, which ends it."""
        made = self._ray.remote(num_cpus=0, max_concurrency=_CALLS, **options)(worker.Worker)
        return made.remote()

    def end(self, worker: Any) -> None:
        """End one that `new` has made, and all that runs there."""
        self._ray.kill(worker)


class Cluster:
    """Ray, for one client. `command` is what runs on a node; to ask nodes, an agent."""

    def __init__(self, cluster: RayCluster, command: Sequence[str], workers: Workers) -> None:
        import ray

        self._ray = ray
        self._cluster = cluster
        self.command = list(command)
        self.workers = workers

    def node_at(self, address: str) -> Mapping[str, Any] | None:
        """The node with this address; None if Ray is certain that it is dead.

        Raises:
            HostUnreachable: Ray knows of none.
        """
        nodes = [node for node in self._ray.nodes() if node["NodeManagerAddress"] == address]
        if not nodes:
            raise HostUnreachable(
                f"Ray knows no node {address}; was the cluster restarted?", hint=LOOK
            )
        return next((node for node in nodes if node["Alive"]), None)

    def facts(self, **question: Any) -> dict[str, Any]:
        """The GPU count of the largest node, and how much `room` each node has when empty; `nodes`
        has each agent's answer, if only agents know what is asked.
        """
        nodes = self._candidates()
        pending = []
        if question.get("modules") or question.get("paths"):
            pending = [(node, self._ask(node, {"do": "facts", **question})) for node in nodes]
        refuse_open(self._cluster)  # while they look; no question has a secret
        most = max(int(node["Resources"].get("GPU", 0)) for node in nodes)
        facts: dict[str, Any] = {
            "address": ADDRESS_AT_SPAWN,
            "gpus": [{"index": i, "uuid": "", "name": "", "memory_bytes": 0} for i in range(most)],
            "cpus": [],
            "ports": [],
            "room": [int(node["Resources"].get(self._cluster.resource, 0)) for node in nodes],
        }
        if pending:
            facts["nodes"] = {
                node["NodeManagerAddress"]: self._answer(node, reference)
                for node, reference in pending
            }
        return facts

    def place(
        self, token: str, turn: int, patience_s: float, abandoned: threading.Event
    ) -> dict[str, Any]:
        """Choose a node for a server and reserve what it needs; returns its address, a free port
        there and the GPUs it may use. `turn` rotates among equal nodes.

        Raises SkyctlError: no node has room, for `patience_s` seconds, or it is `abandoned`.
        Whatever is raised, nothing stays reserved.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cluster = self._cluster
        count = cluster.count if cluster.resource == "GPU" else 0
        shown = None
        try:
            group, node = self._reserve(f"{_PREFIX}{token}", turn, patience_s, abandoned)
            address = node["NodeManagerAddress"]
            worker = self.workers.on(node)
            if count:
                within = PlacementGroupSchedulingStrategy(group, 0)
                worker = shown = self.workers.new(num_gpus=count, scheduling_strategy=within)
            port, visible = self._got(node, worker.place.remote(address))
            gpus = [gpu for gpu in visible.split(",") if count and gpu]
            if any(not gpu.isdigit() for gpu in gpus):  # uuids, of which the agent knows more
                line = json.dumps({"do": "facts", "ports": 0}).encode() + b"\n"
                answer = self._answer(node, worker.ask.remote(self.command, address, line))
                if "error" in answer:
                    raise SkyctlError(answer["error"])
                gpus = [gpu["index"] for gpu in answer["gpus"]]
            if len(gpus) != count:
                raise SkyctlError(f"{address} has given GPUs {visible!r}, not {count}")
        except BaseException:
            self.release(token)
            raise
        finally:
            if shown is not None:
                self.workers.end(shown)
        return {"target": address, "address": address, "port": port, "gpus": [*map(int, gpus)]}

    def lend_gpu(self) -> tuple[Mapping[str, Any], Any]:
        """A node, and a worker with a GPU there, which Ray takes back when the worker ends. Raises
        SkyctlError: none is free.
        """
        free = self._free("GPU")
        for node in self._candidates():
            if free.get(node["NodeID"], 0) >= 1:
                return node, self.workers.new(num_gpus=1, scheduling_strategy=_only_on(node))
        raise SkyctlError(
            "no node of the Ray cluster has a GPU free for the sender: leave one, or write "
            "`weight_transfer: {transport: ipc}`"
        )

    def stop(self, token: str, hosted: str, target: str, timeout_s: float) -> dict[str, Any]:
        """End a server on its node, if one was chosen, and release its reservation. On a node that
        Ray considers dead it ends by itself, if it still runs.

        Raises SkyctlError: it is unknown whether it has ended.
        """
        answer: dict[str, Any] = {"gently": True}
        if target and (node := self.node_at(target)) is not None:
            request = {"do": "stop", "token": hosted, "timeout_s": timeout_s}
            answer = self._answer(node, self._ask(node, request), timeout_s + WORKER_TIMEOUT_S)
        if "error" in answer:
            raise HostUnreachable(answer["error"], hint=LOOK)
        self.release(token)
        return answer

    def release(self, token: str) -> None:
        """Give back what was reserved for a server, if anything was."""
        from ray.util.placement_group import get_placement_group, remove_placement_group

        with contextlib.suppress(ValueError):  # there is none
            remove_placement_group(get_placement_group(f"{_PREFIX}{token}"))

    # --- nodes ---------------------------------------------------------------------------------

    def _candidates(self) -> list[Mapping[str, Any]]:
        cluster = self._cluster
        candidates = [
            node
            for node in self._ray.nodes()
            if node["Alive"]
            and (cluster.head or _HEAD not in node["Resources"])
            and all(node["Labels"].get(name) == value for name, value in cluster.labels)
        ]
        if not candidates:
            labels = ", ".join(f"{name}: {value}" for name, value in cluster.labels)
            raise HostUnreachable(
                "the Ray cluster has no node for servers"
                + (f" with the labels {labels}" if labels else "")
                + ("" if cluster.head else "; its head carries none"),
                hint="add nodes, or `ray: {head: true}`"
                + (", or correct `ray: {nodes: ...}`" if labels else ""),
            )
        return sorted(candidates, key=lambda node: str(node["NodeManagerAddress"]))

    def _reserve(
        self, name: str, turn: int, patience_s: float, abandoned: threading.Event
    ) -> tuple[Any, Mapping[str, Any]]:
        """A placement group on the best node that has room. Raises as `place`."""
        from ray.util.placement_group import placement_group, remove_placement_group

        cluster, deadline = self._cluster, time.monotonic() + patience_s
        bundles = [{cluster.resource: cluster.count}]
        while True:
            with _one_at_a_time(deadline):
                nodes, free = self._candidates(), self._free(cluster.resource)
                for node in self._in_order(nodes, turn):
                    if free.get(node["NodeID"], 0) < cluster.count:
                        continue
                    _refuse_abandoned(abandoned)
                    pinned = [{_NODE_LABEL: node["NodeID"]}]
                    group = placement_group(
                        bundles, name=name, lifetime="detached", bundle_label_selector=pinned
                    )
                    if group.wait(_PINNED_S):
                        _refuse_abandoned(abandoned)
                        return group, node
                    remove_placement_group(group)  # another process was faster, or `stop` came
            if time.monotonic() > deadline:
                shown = ", ".join(
                    f"{node['NodeManagerAddress']} {free.get(node['NodeID'], 0):g} of "
                    f"{node['Resources'].get(cluster.resource, 0):g}"
                    for node in nodes
                )
                raise SkyctlError(
                    f"no node has {cluster.count} {cluster.resource} free for it (free: {shown})"
                )
            abandoned.wait(_LOOK_S)
            _refuse_abandoned(abandoned)

    def _in_order(self, nodes: list[Mapping[str, Any]], turn: int) -> list[Mapping[str, Any]]:
        """Nodes with few servers first, or with many; `turn` rotates among equals."""
        from ray.util.placement_group import placement_group_table

        servers = Counter(
            node
            for group in placement_group_table().values()
            if str(group["name"]).startswith(_PREFIX) and group["state"] == "CREATED"
            for node in group["bundles_to_node_id"].values()
        )
        if not self._cluster.spread:
            return sorted(nodes, key=lambda node: -servers[node["NodeID"]])
        first = turn % len(nodes)
        return sorted(nodes[first:] + nodes[:first], key=lambda node: servers[node["NodeID"]])

    def _free(self, resource: str) -> dict[str, float]:
        from ray._private.state import available_resources_per_node  # as vLLM does

        by_node = available_resources_per_node()
        return {node: free.get(resource, 0.0) for node, free in by_node.items()}

    # --- their agents --------------------------------------------------------------------------

    def _ask(self, node: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
        """Send a request to a node's agent."""
        line = json.dumps(request).encode() + b"\n"
        return self.workers.on(node).ask.remote(self.command, node["NodeManagerAddress"], line)

    def _answer(
        self, node: Mapping[str, Any], reference: Any, timeout_s: float = WORKER_TIMEOUT_S
    ) -> dict[str, Any]:
        """An agent's answer, or its `error`."""
        address = node["NodeManagerAddress"]
        try:
            code, stdout, stderr = self._got(node, reference, timeout_s)
        except SkyctlError as error:
            return {"error": error.message}
        messages = [json.loads(line) for line in stdout.splitlines() if line.startswith(b'{"')]
        if len(messages) < 2:
            place = Node(address, address, self.command[0], (), 0.0, self._cluster)
            return {"error": explained(place, code, stderr).message}
        return {"skyctl": messages[0]["skyctl"], **messages[1]}

    def _got(
        self, node: Mapping[str, Any], reference: Any, timeout_s: float = WORKER_TIMEOUT_S
    ) -> Any:
        """What a worker returns. Raises SkyctlError."""
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except Exception as error:  # Ray's errors have many types
            address = node["NodeManagerAddress"]
            raise SkyctlError(
                f"{address} does not answer over Ray ({type(error).__name__})"
            ) from error
