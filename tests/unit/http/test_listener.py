"""The socket of a server of ours."""

from __future__ import annotations

import socket

from skyctl.http.listener import listen_at


def test_what_is_sent_to_a_connection_leaves_at_once() -> None:
    listener = listen_at("127.0.0.1", 0, backlog=1)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
