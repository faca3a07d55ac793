"""What strangers can take of the supervisor's process: so many connections, each for so long.

Its probes of servers need descriptors too: where a stranger has them all, servers look dead.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 64
IDLE_S = 15.0


class BoundedListener(socket.socket):
    """Closes at once what comes while `most` connections are open, in a TLS handshake or after."""

    def __init__(self, listener: socket.socket, *, most: int = MOST_CONNECTIONS) -> None:
        super().__init__(fileno=listener.detach())
        self._most = most
        self._accepted: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError, after which asyncio waits for the next."""
        connection, address = super().accept()
        self._accepted = [one for one in self._accepted if one.fileno() >= 0]
        if len(self._accepted) >= self._most:
            connection.close()
            raise ConnectionAbortedError
        self._accepted.append(connection)
        return connection, address


class ImpatientProtocol(H11Protocol):
    """Closes a connection on which no whole request head came for `idle_s` seconds."""

    idle_s = IDLE_S
    _timer: asyncio.TimerHandle | None = None
    _before: object = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.idle_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._before:
            self.transport.close()
            return
        self._before = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._look)
