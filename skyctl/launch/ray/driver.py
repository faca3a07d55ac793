"""Connects to Ray, as ssh does to a machine: the only process that imports Ray.

    python -m skyctl.launch.ray.driver CLUSTER ADDRESS COMMAND

runs COMMAND, which is an agent, on the node at ADDRESS, with its pipes connected to ours. If
ADDRESS is `A_GPU`, COMMAND runs wherever a GPU is free, which it has to itself. If ADDRESS is "",
it is itself the agent of the cluster, and answers one request (`cluster.py`). After
`place`, `relay` connects it to the agent of a node: a connection to Ray takes seconds to make.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from skyctl import __version__
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import A_GPU, RayCluster
from skyctl.launch.ray.cluster import Cluster
from skyctl.launch.ray.connection import LOOK, connect, told
from skyctl.launch.remote.session import PROTOCOL

_PIECE = 64 * 1024
_START_S = 25.0


def main() -> None:
    """Act as ssh to a node, or as the agent of the cluster."""
    out = os.dup(1)
    os.dup2(2, 1)  # Ray prints to stdout

    def say(message: Mapping[str, Any]) -> None:
        os.write(out, json.dumps(message).encode() + b"\n")

    try:
        wanted = json.loads(sys.argv[1])
        wanted = RayCluster(**{**wanted, "labels": tuple(map(tuple, wanted["labels"]))})
        connect(wanted)
        cluster = Cluster(wanted, shlex.split(sys.argv[3]))
        if sys.argv[2] == A_GPU:
            _relay(cluster, *cluster.lend_gpu(), out)
        elif address := sys.argv[2] or _answer(cluster, say):
            _go_on(cluster, address, say, out)
        os._exit(0)  # the thread that reads our stdin keeps reading
    except HostUnreachable as error:
        why, message = error.message, {"unreachable": error.message, "hint": error.hint}
    except SkyctlError as error:
        why, message = error.message, {"error": error.message}
    except Exception as error:  # Ray's errors have many types
        why = f"Ray: {told(error)}"
        message = {"unreachable": why, "hint": LOOK}
    say(message)
    os.write(2, f"{why}\n".encode())  # for who reads no messages: a sender's parent
    os._exit(1)


def _answer(cluster: Cluster, say: Callable[[Mapping[str, Any]], None]) -> str:
    """Answer one request; the address of the node to go on with, or ""."""
    say({"agent": PROTOCOL, "skyctl": __version__})
    work: dict[str, Callable[..., dict[str, Any]]]
    work = {"facts": cluster.facts, "place": cluster.place, "stop": cluster.stop}
    request = _next_request()
    if (kind := request.pop("do")) in work:
        say(work[kind](**request))
    return str(_next_request().get("target", "")) if kind == "place" else ""


def _next_request() -> dict[str, Any]:
    # byte by byte: what follows the line is for the agent of a node
    line = b""
    while (piece := os.read(0, 1)) not in (b"", b"\n"):
        line += piece
    return dict(json.loads(line or b'{"do": ""}'))


def _go_on(
    cluster: Cluster, address: str, say: Callable[[Mapping[str, Any]], None], out: int
) -> None:
    """With the agent of a node; if Ray considers the node dead, say only that."""
    if (node := cluster.node_at(address)) is None:
        say({"agent": PROTOCOL, "skyctl": __version__})
        _next_request()
        say({"ended": f"lost its node: Ray says that {address} is dead"})
        return
    _relay(cluster, node, cluster.relay(node), out)


def _relay(cluster: Cluster, node: Mapping[str, Any], agent: Any, out: int) -> None:
    """Connect our pipes to what runs on a node until it ends; then exit as it did."""
    import ray

    address = node["NodeManagerAddress"]

    def listen() -> None:
        data = b" "
        with contextlib.suppress(Exception):  # the reader ends as well, and reports why
            while data:
                data = os.read(0, _PIECE)
                ray.get(agent.write.remote(data))

    try:
        ray.get(agent.start.remote(cluster.command, address), timeout=_START_S)
        threading.Thread(target=listen, daemon=True).start()
        while data := ray.get(agent.read.remote()):
            os.write(out, data)
        code, words = ray.get(agent.end.remote())
    except Exception as error:  # Ray's errors have many types
        lost = f"{address} does not answer over Ray ({type(error).__name__})"
        raise HostUnreachable(lost, hint=LOOK) from error
    os.write(2, words)
    os._exit(code)


if __name__ == "__main__":
    main()
