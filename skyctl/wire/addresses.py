"""Which address of this machine another one reaches."""

from __future__ import annotations

import socket


def address_towards(host: str) -> str:
    """This machine's address on the way to a host; its own name leads to its own address.

    Raises:
        OSError: there is no way to it, or no such name.
    """
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sending:
        sending.connect(address)  # sends nothing
        return str(sending.getsockname()[0])
