"""The one connection to a Ray cluster, shared by its clients (`client.py`): the only process
that imports Ray.

    python -m skyctl.launch.ray.driver NAME CLUSTER

To connect takes seconds, and so does the first worker on a node. So it stays until all processes
that had it asked have ended. If the cluster does not answer, or is another one by now, it takes no
more clients, and the next one starts another driver.

For a client with an ADDRESS it runs COMMAND, which is an agent or a sender, on the node there, with
its pipes connected to the client's. If ADDRESS is `A_GPU`, COMMAND runs wherever a GPU is free,
which it has to itself. If it is "", the driver is itself the agent of the cluster, and answers one
request (`cluster.py`). After `place`, `relay` connects the client to the agent of a node.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl import __version__
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import A_GPU, RayCluster
from skyctl.launch.ray.client import DRIVERS_NAME, TAKEN
from skyctl.launch.ray.cluster import Cluster, Workers
from skyctl.launch.ray.connection import LOOK, connect, connected, in_one_line
from skyctl.launch.remote.session import PROTOCOL
from skyctl.store.identity import peer

_PIECE = 64 * 1024
_START_S = 25.0
_NOBODY_S = 30.0
_MOST_FDS = 4
_ASKED_S = 5.0


def main() -> None:
    """Listen, become a daemon, connect, and serve until no client is left."""
    name, cluster = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return  # another was faster
    listener.listen(128)
    if os.fork():
        os._exit(0)  # clients wait from here on
    listener.listen(128)  # again: as whose process the kernel shows it to them
    os.setsid()
    Path("/proc/self/comm").write_text(DRIVERS_NAME)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    failure, workers = None, None
    try:
        connect(_ray_cluster(json.loads(cluster)))
        workers = Workers()
    except Exception as error:
        failure = error
    _Driver(listener, workers, failure).run()
    os._exit(0)  # threads may be reading


def _ray_cluster(fields: Mapping[str, Any]) -> RayCluster:
    return RayCluster(**{**fields, "labels": tuple(map(tuple, fields["labels"]))})


@dataclass
class _Client:
    """A process on this machine whose pipes this driver has."""

    channel: socket.socket
    """The connection to it."""
    pipes: tuple[int, int, int]
    """Its stdin, stdout and stderr."""
    cluster: RayCluster
    """Where its program is to run."""
    address: str
    """The node's address, "" for any."""
    command: list[str]
    """The program and its arguments."""
    gone: Callable[[], object] = field(default=lambda: None)
    """Called if it ends before its program does."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set before that call."""
    listened: bool = False
    """Whether it is registered for events."""

    def send(self, message: Mapping[str, Any]) -> None:
        os.write(self.pipes[1], json.dumps(message).encode() + b"\n")

    def next_request(self) -> dict[str, Any]:
        # byte by byte: what follows the line is for the agent of a node
        line = b""
        while (piece := os.read(self.pipes[0], 1)) not in (b"", b"\n"):
            line += piece
        return dict(json.loads(line or b'{"do": ""}'))


class _Driver:
    """`failure` is why it is not connected: all clients so far are told."""

    def __init__(
        self, listener: socket.socket, workers: Workers | None, failure: Exception | None
    ) -> None:
        self._listener = listener
        self._workers = workers
        self._failure = failure
        self._holders: dict[int, int] = {}
        self._serving = 0
        self._retired = threading.Event()
        if failure is not None:
            self._retired.set()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0)

    def run(self) -> None:
        """Serve until no client is left."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_NOBODY_S):
                    if key.fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif key.fileobj is self._listener:
                        self._accept(selector)
                    else:  # a holder has ended
                        selector.unregister(key.fd)
                        os.close(self._holders.pop(key.data))
                if self._retired.is_set() and not self._closed.is_set():
                    selector.unregister(self._listener)
                    self._listener.close()
                    self._closed.set()
                if not self._serving and (self._retired.is_set() or not self._holders):
                    return

    def _accept(self, selector: selectors.BaseSelector) -> None:
        while True:
            try:
                channel, _ = self._listener.accept()
            except OSError:  # no more
                return
            if peer(channel)[1] != os.getuid():
                channel.close()
                continue
            channel.settimeout(_ASKED_S)
            line, pipes = b"", list[int]()
            with contextlib.suppress(OSError):  # it has ended
                line, pipes, *_ = socket.recv_fds(channel, _PIECE, _MOST_FDS)
            if len(pipes) < 3:
                channel.close()
                continue
            channel.settimeout(None)
            request = json.loads(line)
            for alive in pipes[3:]:
                if request["parent"] in self._holders:
                    os.close(alive)
                    continue
                self._holders[request["parent"]] = alive
                selector.register(alive, selectors.EVENT_READ, request["parent"])
            client = _Client(
                channel,
                (pipes[0], pipes[1], pipes[2]),
                _ray_cluster(request["cluster"]),
                request["address"],
                shlex.split(request["command"]),
            )
            with self._lock:
                self._serving += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _retire(self) -> None:
        """Let the next client start another driver."""
        self._retired.set()
        os.eventfd_write(self._wake, 1)
        self._closed.wait()

    def _serve(self, client: _Client) -> None:
        try:
            if self._failure is None and not connected():
                self._retire()  # first: the client tries again
                return
            client.channel.send(TAKEN)
            threading.Thread(target=_watch, args=(client,), daemon=True).start()
            client.channel.send(str(self._carry_out(client)).encode())
        except OSError:  # the client has ended
            pass
        finally:
            for pipe in client.pipes[client.listened :]:
                os.close(pipe)
            # wakes `_watch`, which would keep it open
            with contextlib.suppress(OSError):
                client.channel.shutdown(socket.SHUT_RDWR)
            client.channel.close()
            with self._lock:
                self._serving -= 1
            os.eventfd_write(self._wake, 1)

    def _carry_out(self, client: _Client) -> int:
        """Do what the client wants; its exit code."""
        message: dict[str, str]
        try:
            if self._failure is not None:
                raise self._failure
            assert self._workers is not None
            return _do(client, Cluster(client.cluster, client.command, self._workers))
        except HostUnreachable as error:
            text, message = error.message, {"unreachable": error.message, "hint": error.hint}
        except SkyctlError as error:
            text, message = error.message, {"error": error.message}
        except BrokenPipeError:  # the client has ended
            return 1
        except Exception as error:  # Ray's errors have many types
            if self._failure is None:
                self._retire()
            text = f"Ray: {in_one_line(error)}"
            message = {"unreachable": text, "hint": LOOK}
        client.send(message)
        os.write(client.pipes[2], f"{text}\n".encode())  # for a sender's parent
        return 1


def _watch(client: _Client) -> None:
    """Until the client has ended."""
    with contextlib.suppress(OSError):
        client.channel.recv(1)
    client.ended.set()
    client.gone()


def _do(client: _Client, cluster: Cluster) -> int:
    if client.address == A_GPU:
        its_node, worker = cluster.lend_gpu()
        try:
            return _relay(client, its_node, worker)
        finally:
            cluster.workers.end(worker)
    address = client.address or _answer(client, cluster)
    if not address:
        return 0
    if (node := cluster.node_at(address)) is not None:
        return _relay(client, node, cluster.workers.on(node))
    client.send({"agent": PROTOCOL, "skyctl": __version__})
    client.next_request()
    client.send({"ended": f"lost its node: Ray says that {address} is dead"})
    return 0


def _answer(client: _Client, cluster: Cluster) -> str:
    """Answer one request; the address of the node to go on with, or ""."""
    client.send({"agent": PROTOCOL, "skyctl": __version__})
    work: dict[str, Callable[..., dict[str, Any]]]
    work = {"facts": cluster.facts, "stop": cluster.stop}
    request = client.next_request()
    if (kind := request.pop("do")) == "place":
        _place(client, cluster, request)
        return str(client.next_request().get("target", ""))
    if kind in work:
        client.send(work[kind](**request))
    return ""


def _place(client: _Client, cluster: Cluster, request: Mapping[str, Any]) -> None:
    """Have a node reserved, unless the client ends before it has the answer: the `stop` that
    follows may have come before there was a reservation."""
    place = cluster.place(**request, abandoned=client.ended)
    try:
        if client.ended.is_set():  # its parent, which reads the answer, may be about to end
            raise BrokenPipeError
        client.send(place)
    except BrokenPipeError:
        cluster.release(request["token"])
        raise


def _relay(client: _Client, node: Mapping[str, Any], worker: Any) -> int:
    """Connect the client's pipes to what runs on a node until it ends; its exit code."""
    import ray

    address, name = node["NodeManagerAddress"], secrets.token_hex(8)
    stdin, stdout, stderr = client.pipes

    def listen() -> None:
        data = b" "
        with contextlib.suppress(Exception):  # the reader ends as well, and reports why
            while data:
                data = os.read(stdin, _PIECE)
                ray.get(worker.write.remote(name, data))
        os.close(stdin)

    try:
        ray.get(worker.start.remote(name, client.command, address), timeout=_START_S)
        client.gone = lambda: worker.stop.remote(name)
        client.listened = True
        threading.Thread(target=listen, daemon=True).start()
        while data := ray.get(worker.read.remote(name)):
            os.write(stdout, data)
        code, words = ray.get(worker.end.remote(name))
    except BrokenPipeError:
        raise
    except Exception as error:  # Ray's errors have many types
        lost = f"{address} does not answer over Ray ({type(error).__name__})"
        raise HostUnreachable(lost, hint=LOOK) from error
    finally:
        worker.stop.remote(name)
    os.write(stderr, words)
    return int(code)


if __name__ == "__main__":
    main()
