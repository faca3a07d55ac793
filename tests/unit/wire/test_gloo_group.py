"""A gloo group is of ranks that know its secret."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

from skyctl.engines.vllm.inside.receivers import open_receiver
from skyctl.transfer.transports import gloo
from skyctl.wire.gloo_group import form_group
from skyctl.wire.group_store import GroupStore
from skyctl.wire.messages import ChunkUpdate, ReceiverInit

SESSION = "0123456789abcdef"
OPTIONS = {
    "address": "127.0.0.1",
    "world_size": 2,
    "rendezvous_timeout_s": 10.0,
    "update_timeout_s": 10.0,
}


def test_ranks_of_several_addresses_form_a_group_whose_store_is_closed_then() -> None:
    """The sender is at one address of this machine, and a server at another."""
    carrier = gloo.open_carrier(SESSION, {**OPTIONS, "address": "127.0.0.2"})
    (slot,) = carrier.allocate(1, 64)
    slot[:] = bytes(range(64))
    endpoint = carrier.endpoint()
    received: list[Any] = []

    def receive() -> None:
        receiver = open_receiver(_init(endpoint), 0)
        update = ChunkUpdate(0, 0, 64, ["w"], ["uint8"], [[64]], [0], [0])
        received.extend(receiver.receive(update))
        receiver.close()

    with _running(receive):
        carrier.join()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", endpoint["port"]), 5)
        carrier.send(0, 64)
    ((name, tensor),) = received
    assert (name, bytes(tensor.tolist())) == ("w", bytes(range(64)))
    carrier.close()


def test_who_took_a_ranks_place_in_gloo_gets_no_weights() -> None:
    """The store's secret is right, and the proof over the connection is not."""
    store = GroupStore("127.0.0.1", bytes(32), ranks=1, timeout_s=5)
    failed: list[BaseException] = []

    def join(secret: bytes, rank: int) -> None:
        named = {"address": "127.0.0.1", "world_size": 2, "timeout_s": 5.0}
        try:
            form_group(store, secret, rank=rank, **named)  # type: ignore[arg-type]
        except RuntimeError as error:
            failed.append(error)

    with _running(lambda: join(bytes(32), 0)):
        join(b"another", 1)
    store.close()
    assert any("took the place of rank 1" in str(error) for error in failed)
    assert len(failed) == 2


def test_the_secret_is_in_no_text_of_what_a_server_is_told() -> None:
    endpoints = []
    for _ in range(2):
        carrier = gloo.open_carrier(SESSION, OPTIONS)
        endpoints.append(carrier.endpoint())
        carrier.close()
    one, other = (endpoint["secret"] for endpoint in endpoints)
    assert len(bytes.fromhex(one)) == 32
    assert one != other
    assert one not in repr(_init(endpoints[0]))


def _init(endpoint: dict[str, Any]) -> ReceiverInit:
    return ReceiverInit("gloo", SESSION, ["w"], 64, {**endpoint, "rank_offset": 1})


@contextmanager
def _running(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def test_a_group_that_is_not_complete_ends_at_its_deadline() -> None:
    carrier = gloo.open_carrier(SESSION, {**OPTIONS, "rendezvous_timeout_s": 0.3})
    with pytest.raises((RuntimeError, OSError)):
        carrier.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", carrier._store.port), 5)
    carrier.close()
