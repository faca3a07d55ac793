"""The store where ranks over NCCL find each other: on loopback, and closed once they have.

torch's TCPStore serves every process that connects, and vLLM unpickles what it holds. So
none may connect to it any more when every rank has: the connections of the ranks live on.
"""

from __future__ import annotations

import os
import socket
from typing import Any

HOST = "127.0.0.1"


class Rendezvous:
    """A listening socket on an ephemeral port of loopback, to be handed to a TCPStore."""

    def __init__(self, world_size: int) -> None:
        self.socket = socket.socket()
        self.socket.bind((HOST, 0))
        self.socket.listen(world_size + 8)
        self.port: int = self.socket.getsockname()[1]
        self._descriptor = self.socket.fileno()

    def close(self, store: Any) -> None:
        """Refuse connections from now on to `store`, which took the socket over.

        The store polls the descriptor by its number: what takes its place never becomes ready.
        """
        silent = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(silent, self._descriptor, inheritable=False)
        os.close(silent)
        # a poll under way keeps the old socket open: once this is answered it is over
        store.set("closed", "1")
        store.get("closed")
