"""The store of a group serves its ranks, and nobody who comes after them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from skyctl.engines.vllm.inside.wire import ReceiverInit
from skyctl.transfer.transports.rendezvous import HOST, Rendezvous

dist = pytest.importorskip("torch.distributed")
TIMEOUT = timedelta(seconds=10)
SESSION = "0123456789abcdef"


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


def test_a_group_over_gloo_is_closed_to_others_once_it_is_formed() -> None:
    import torch

    from skyctl.engines.vllm.inside.receivers.gloo import open_receiver
    from skyctl.transfer.transports import gloo

    options = {"world_size": 2, "rendezvous_timeout_s": 10.0, "update_timeout_s": 10.0}
    carrier = gloo.open_carrier(SESSION, options)
    endpoint = {**carrier.endpoint(), "rank_offset": 1}
    received: list[torch.Tensor] = []

    def receive() -> None:
        receiver = open_receiver(_init(endpoint), 0)
        received.append(torch.zeros(1))
        assert receiver._group is not None
        receiver._group.broadcast(received[0], 0).wait(TIMEOUT)

    with _running(receive):
        carrier.join()
        assert _refused(endpoint["port"])
        carrier._group.broadcast(torch.ones(1), 0).wait(TIMEOUT)
    assert received == [torch.ones(1)]
    carrier.close()


def test_a_receiver_whose_sender_has_died_does_not_wait_for_it() -> None:
    from skyctl.engines.vllm.inside.receivers.gloo import open_receiver

    rendezvous = Rendezvous(2)
    rendezvous.socket.close()
    endpoint = {"host": HOST, "port": rendezvous.port, "rank_offset": 1, "world_size": 2}
    with pytest.raises(ConnectionRefusedError):
        open_receiver(_init({**endpoint, "rendezvous_timeout_s": 600.0}), 0)


def _init(endpoint: dict[str, object]) -> ReceiverInit:
    return ReceiverInit("gloo", SESSION, [], 64, endpoint)


@contextmanager
def _running(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def _refused(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 5).close()
    except ConnectionRefusedError:
        return True
    return False
