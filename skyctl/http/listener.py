"""The listening socket of our own servers."""

from __future__ import annotations

import socket


def listen_at(host: str, port: int, *, backlog: int) -> socket.socket:
    """Listen on TCP; port 0 picks a free one. Raises OSError.

    Sets TCP_NODELAY: asyncio does not recognise such a socket as TCP, and the kernel would hold the
    second part of an answer back until the first is acknowledged, for up to 40 ms.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener
