"""Many stub endpoints in one process: each port answers like a server, after a delay of its own.

    python -m benchmarks.stub_endpoints --count 64

Prints one JSON line {"ports": […], "delays_ms": […]}. For every line on stdin it prints one line
about the time since the last: {"pauses": when each endpoint was asked to pause (time.monotonic,
which processes of one machine share), "late_ms": how late the latest answer left, "cpu_s": …}.
Ends when stdin does.

One loop over epoll, without asyncio: an answer costs it about a fifth of what the fastest client
needs for the call, so that it is the client that is measured.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import resource
import select
import socket
import sys
import time

SHORTEST_MS, LONGEST_MS = 5.0, 50.0
# the few routes that pause, resume and status of an attached fleet ask for; {} to any other
_BODIES = {
    b"/is_paused": b'{"is_paused": false}',
    b"/is_sleeping": b'{"is_sleeping": false}',
    b"/version": b'{"version": "0.32.0"}',
    b"/v1/models": b'{"object": "list", "data": [{"id": "stub"}]}',
    b"/weight_info": b'{"weight_version": "default"}',
    b"/metrics": b"",
}
_CLOSING = b"connection: close"


class Endpoints:
    """Listening sockets, their connections, and the answers that are due."""

    def __init__(self, delays_s: list[float]) -> None:
        self._epoll = select.epoll()
        self._listening: dict[int, tuple[socket.socket, float]] = {}
        self._open: dict[int, tuple[socket.socket, float]] = {}
        self._due: list[tuple[float, int, bytes]] = []  # when, on which connection, to what
        self.pauses: list[float] = []
        self.late_s = 0.0
        self.ports: list[int] = []
        for delay_s in delays_s:
            listener = socket.create_server(("127.0.0.1", 0), backlog=16)
            listener.setblocking(False)
            self.ports.append(listener.getsockname()[1])
            self._listening[listener.fileno()] = (listener, delay_s)
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    def serve(self, told: int) -> None:
        """Answer until the file descriptor `told` can be read."""
        self._epoll.register(told, select.EPOLLIN)
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for number, _ in self._epoll.poll(wait_s):
                if number in self._open:
                    self._hear(number)
                elif number in self._listening:
                    self._accept(number)
                else:
                    self._epoll.unregister(told)
                    return
            self._answer()

    def _accept(self, number: int) -> None:
        listener, delay_s = self._listening[number]
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._open[connection.fileno()] = (connection, delay_s)
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _hear(self, number: int) -> None:
        """A request without a body, or with a short one, arrives in one piece."""
        connection, delay_s = self._open[number]
        try:
            request = connection.recv(65536)
        except OSError:
            request = b""
        if not request:
            del self._open[number]
            connection.close()
            return
        now = time.monotonic()
        if request.startswith(b"POST /pause"):
            self.pauses.append(now)
        heapq.heappush(self._due, (now + delay_s, number, request))

    def _answer(self) -> None:
        while self._due and self._due[0][0] <= (now := time.monotonic()):
            at, number, request = heapq.heappop(self._due)
            self.late_s = max(self.late_s, now - at)
            if number not in self._open:
                continue
            connection, _ = self._open[number]
            closing = _CLOSING in request.lower()
            try:
                connection.send(_answer_to(request, closing=closing))
            except OSError:
                closing = True
            if closing:
                del self._open[number]
                connection.close()


def _answer_to(request: bytes, *, closing: bool) -> bytes:
    body = _BODIES.get(request.split(b" ", 2)[1].partition(b"?")[0], b"{}")
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n%s"
        % (_CLOSING + b"\r\n" if closing else b"", len(body), body)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chance = random.Random(options.seed)
    delays_ms = [chance.uniform(SHORTEST_MS, LONGEST_MS) for _ in range(options.count - 1)]
    # the longest is always there, and asked last: what the slowest takes is not a matter of luck
    delays_ms.append(LONGEST_MS)
    endpoints = Endpoints([delay_ms / 1000 for delay_ms in delays_ms])
    print(json.dumps({"ports": endpoints.ports, "delays_ms": delays_ms}), flush=True)
    while True:
        endpoints.serve(sys.stdin.fileno())
        if not sys.stdin.readline():
            return
        told = {
            "pauses": endpoints.pauses,
            "late_ms": endpoints.late_s * 1000,
            "cpu_s": time.process_time(),
        }
        print(json.dumps(told), flush=True)
        endpoints.pauses, endpoints.late_s = [], 0.0


if __name__ == "__main__":
    main()
