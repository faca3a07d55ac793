"""Many stub endpoints in one process: each port answers like a server, after a delay of its own.

    python -m benchmarks.stub_endpoints --count 64

Prints one JSON line {"ports": […], "delays_ms": […]}. For every line on stdin it prints one line
{"pauses": […]}: the clock (time.monotonic, which processes of one machine share) at which each
endpoint was asked to pause since the last line. Ends when stdin does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time

SHORTEST_MS, LONGEST_MS = 5.0, 50.0
# the few routes that pause, resume and status of an attached fleet ask for; {} to any other
_BODIES = {
    "/is_paused": b'{"is_paused": false}',
    "/is_sleeping": b'{"is_sleeping": false}',
    "/version": b'{"version": "0.32.0"}',
    "/v1/models": b'{"object": "list", "data": [{"id": "stub"}]}',
    "/weight_info": b'{"weight_version": "default"}',
    "/metrics": b"",
}


class Endpoint(asyncio.Protocol):
    """One connection to one stub; understands requests without a body or with a short one."""

    def __init__(self, index: int, delay_s: float, pauses: list[float]) -> None:
        self._index, self._delay_s, self._pauses = index, delay_s, pauses
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if b"\r\n\r\n" not in self._received:
            return
        request, self._received = self._received, b""
        if request.startswith(b"POST /pause"):
            self._pauses.append(time.monotonic())
        self._loop.call_later(self._delay_s, self._answer, request)

    def _answer(self, request: bytes) -> None:
        if self._transport.is_closing():
            return
        path = request.split(b" ", 2)[1].partition(b"?")[0].decode()
        body = _BODIES.get(path, b"{}")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        closing = b"connection: close" in request.lower()
        self._transport.write(
            head.encode() + (b"\r\nconnection: close" if closing else b"") + b"\r\n\r\n" + body
        )
        if closing:
            self._transport.close()


async def serve(count: int) -> None:
    """Listen on `count` free loopback ports until stdin ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop, chance = asyncio.get_running_loop(), random.Random(count)
    # the longest is always there: what the slowest server takes does not depend on luck
    delays = [LONGEST_MS, *(chance.uniform(SHORTEST_MS, LONGEST_MS) for _ in range(count - 1))]
    pauses: list[float] = []
    ports = []
    for index, delay in enumerate(delays):
        server = await loop.create_server(
            lambda index=index, delay=delay: Endpoint(index, delay / 1000, pauses), "127.0.0.1", 0
        )
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"ports": ports, "delays_ms": delays}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps({"pauses": pauses}), flush=True)
        pauses.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, required=True)
    asyncio.run(serve(parser.parse_args().count))


if __name__ == "__main__":
    main()
