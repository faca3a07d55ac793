"""Servers that speak bytes, in threads: what they do is done before the event loop looks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Answer, Request

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
_PATIENCE_S = 10.0


def request(url: str, method: str = "POST", path: str = "/pause", **more: Any) -> Request:
    return Request(method, url, path, more.pop("headers", {}), **more)


class ByteServer:
    """A listener on a loopback port. Connections it accepted are closed with it."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._listener.settimeout(_PATIENCE_S)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.accepted: list[socket.socket] = []
        self.heard: list[bytes] = []

    def close(self) -> None:
        for connection in (*self.accepted, self._listener):
            connection.close()

    def accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_PATIENCE_S)
        self.accepted.append(connection)

    def nobody_waits(self) -> bool:
        """No connection was opened beside the accepted ones."""
        self._listener.setblocking(False)
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return True
        finally:
            self._listener.settimeout(_PATIENCE_S)
        return False

    def receive(self) -> None:
        """Read one request on the latest connection."""
        self.heard.append(self.accepted[-1].recv(65536))

    def send(self, answer: bytes, *, hang_up: bool = False) -> None:
        self.accepted[-1].sendall(answer)
        if hang_up:
            self.accepted[-1].close()

    async def serve(
        self,
        connections: KeptConnections,
        request: Request,
        answer: bytes = OK,
        *,
        fresh: bool,
        hang_up: bool = False,
    ) -> Answer:
        """Have `request` sent, on a new connection or the latest one, and answer it."""

        def act() -> None:
            if fresh:
                self.accept()
            self.receive()
            self.send(answer, hang_up=hang_up)

        sending = asyncio.create_task(connections.send(request, timeout_s=_PATIENCE_S))
        await in_thread(act)
        return await sending


async def in_thread(act: Callable[[], None]) -> None:
    async with asyncio.timeout(2 * _PATIENCE_S):
        await asyncio.to_thread(act)


@contextlib.contextmanager
def byte_server(port: int = 0) -> Iterator[ByteServer]:
    server = ByteServer(port)
    try:
        yield server
    finally:
        server.close()
