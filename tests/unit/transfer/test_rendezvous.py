"""The store of a group serves its ranks, and nobody who comes after them."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from skyctl.transfer.transports.base import HOST, Rendezvous

dist = pytest.importorskip("torch.distributed")
TIMEOUT = timedelta(seconds=10)


@pytest.mark.parametrize("libuv", [True, False], ids=["torch's default", "as vLLM opens it"])
def test_ranks_go_on_and_newcomers_are_refused(libuv: bool) -> None:
    rendezvous = Rendezvous(2)
    descriptor = rendezvous.socket.detach()
    arguments = {"world_size": 2, "wait_for_workers": False, "timeout": TIMEOUT}
    server = dist.TCPStore(
        HOST,
        rendezvous.port,
        is_master=True,
        master_listen_fd=descriptor,
        use_libuv=libuv,
        **arguments,
    )
    rank = dist.TCPStore(HOST, rendezvous.port, is_master=False, use_libuv=libuv, **arguments)
    rank.set("before", "1")
    rendezvous.close(server)
    assert _refused(rendezvous.port)
    server.set("after", "2")
    assert rank.get("after") == b"2" and server.get("before") == b"1"
    rank.set("from a rank", "3")
    assert server.get("from a rank") == b"3"


def _refused(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 5).close()
    except ConnectionRefusedError:
        return True
    return False
