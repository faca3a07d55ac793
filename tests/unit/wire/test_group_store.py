"""The store where ranks find each other: for those who know the secret, and while they need it."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from skyctl.wire import proofs
from skyctl.wire.group_store import GroupStore, GroupStoreClient

SECRET = bytes(range(32))
ADDRESS = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[GroupStore]:
    opened = GroupStore(ADDRESS, SECRET, ranks=2, timeout_s=5)
    yield opened
    opened.close()


def rank(store: GroupStore, *, secret: bytes = SECRET, timeout_s: float = 5) -> GroupStoreClient:
    return GroupStoreClient(ADDRESS, store.port, secret, timeout_s=timeout_s)


def stranger(store: GroupStore) -> socket.socket:
    """Connected, and greeted with a challenge."""
    connection = socket.create_connection((ADDRESS, store.port), 5)
    assert len(connection.recv(32)) == 32
    return connection


def ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(64) == b""
    except ConnectionResetError:
        return True


def test_what_one_rank_sets_the_others_get_however_early_they_ask(store: GroupStore) -> None:
    first, second = rank(store), rank(store)
    got: list[bytes] = []
    asking = threading.Thread(target=lambda: got.append(first.get("of the second")), daemon=True)
    asking.start()
    second.set("of the second", b"\x00\xff" * 1000)
    asking.join(5)
    assert got == [b"\x00\xff" * 1000]
    store.set("of the sender", b"")
    assert second.get("of the sender") == b""
    assert store.get("of the second") == got[0]
    first.close()
    second.close()


def test_a_rank_that_stays_learns_of_the_end_of_a_store_that_lets_in_no_others(
    store: GroupStore,
) -> None:
    staying, ended = rank(store), threading.Event()
    staying.stay(ended.set)
    late = rank(store)
    store.seal()
    deadline = time.monotonic() + 5
    while True:
        try:
            socket.create_connection((ADDRESS, store.port), 5).close()
        except ConnectionError:
            break
        assert time.monotonic() < deadline
    late.set("key", b"value")  # who is in may go on
    assert store.get("key") == b"value"
    late.close()
    assert not ended.is_set()
    store.close()
    assert ended.wait(5)


def test_a_rank_that_stays_may_leave(store: GroupStore) -> None:
    staying, ended = rank(store), threading.Event()
    staying.stay(ended.set)
    staying.close()
    assert ended.wait(5)


def test_a_rank_learns_its_own_address(store: GroupStore) -> None:
    assert rank(store).address == ADDRESS


def test_who_has_another_secret_is_let_go_and_told_nothing(store: GroupStore) -> None:
    store.set("key", b"value")
    with pytest.raises(ConnectionError, match="let go"):
        rank(store, secret=bytes(32))
    assert rank(store).get("key") == b"value"


@pytest.mark.parametrize("said", [b"x" * 64, b"GET / HTTP/1.1\r\n\r\n" * 1000], ids=len)
def test_garbage_ends_the_connection(store: GroupStore, said: bytes) -> None:
    with stranger(store) as connection:
        connection.sendall(said)
        assert ends(connection)


def test_who_says_nothing_is_not_waited_for(
    store: GroupStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "HANDSHAKE_TIMEOUT_S", 0.1)
    with stranger(store) as connection:
        assert ends(connection)
    rank(store).set("key", b"")


def test_a_crowd_of_strangers_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all ranks at once, and for so many others."""
    monkeypatch.setattr(proofs, "_MOST_STRANGERS", 1)
    store = GroupStore(ADDRESS, SECRET, ranks=2, timeout_s=5)
    crowd = [stranger(store) for _ in range(3)]
    with socket.create_connection((ADDRESS, store.port), 5) as late:
        assert ends(late)
    for connection in crowd:
        connection.sendall(bytes(64))
        assert ends(connection)
        connection.close()
    rank(store).set("key", b"")
    store.close()


@pytest.mark.parametrize(
    "request_head",
    [(0, 257, 0), (0, 3, 1024 * 1024 + 1), (3, 0, 0)],
    ids=["key", "value", "operation"],
)
def test_a_rank_that_asks_for_too_much_is_let_go(
    store: GroupStore, request_head: tuple[int, int, int]
) -> None:
    asking = rank(store, timeout_s=2)  # the store waits for longer
    asking._socket.sendall(struct.pack(">BHI", *request_head))
    with pytest.raises(ConnectionError):
        asking._receive(1)


def test_a_rank_does_not_believe_who_cannot_answer_its_challenge() -> None:
    with socket.create_server((ADDRESS, 0)) as listening:

        def pose() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(bytes(32))
                while connection.recv(64):
                    connection.sendall(bytes(32))

        threading.Thread(target=pose, daemon=True).start()
        with pytest.raises(RuntimeError, match="not this push's sender"):
            GroupStoreClient(ADDRESS, listening.getsockname()[1], SECRET, timeout_s=5)


def test_a_sender_that_has_died_is_not_waited_for(store: GroupStore) -> None:
    store.close()
    with pytest.raises(ConnectionRefusedError):
        rank(store, timeout_s=600)


def test_a_value_that_nobody_sets_is_waited_for_until_the_deadline() -> None:
    store = GroupStore(ADDRESS, SECRET, ranks=2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"not every rank has joined in 0\.2 s"):
        store.get("never")
    with pytest.raises(OSError):
        rank(store, timeout_s=0.2).get("never")
    store.close()


def test_once_closed_it_lets_go_of_all_ranks_and_ends_its_thread(
    store: GroupStore, caplog: pytest.LogCaptureFixture
) -> None:
    connected = rank(store)
    connected.set("key", b"")
    before = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - before < 4
    assert not store._thread.is_alive()
    assert not caplog.records
    with pytest.raises(OSError):
        connected.get("key")
