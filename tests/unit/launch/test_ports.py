"""Finding free ports and the holders of taken ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import psutil
import pytest

from skyctl.launch.local import host as ports
from skyctl.launch.local.host import bind_error, free_port, port_holder

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_free_ports_are_free_and_never_given_twice() -> None:
    given = [free_port(HOST) for _ in range(50)]
    assert len(set(given)) == 50
    assert all(port_holder(HOST, port) is None for port in given)


def test_what_another_process_has_chosen_is_not_chosen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs, ours = free_port(HOST), free_port(HOST)
    for port in (theirs, ours):
        ports._given.discard(port)
    ports._claims.pop().close()  # of ours; that of theirs lives on
    drawn = iter((theirs, ours))
    monkeypatch.setattr(ports.random, "randint", lambda first, last: next(drawn))
    assert free_port(HOST) == ours


def test_choosing_many_ports_keeps_few_descriptors() -> None:
    for _ in range(ports._MOST_CLAIMS):
        free_port(HOST)
    before = psutil.Process().num_fds()
    for _ in range(50):
        free_port(HOST)
    assert psutil.Process().num_fds() <= before


def test_the_holder_of_a_port_is_named_by_pid_and_command(taken: int) -> None:
    holder = port_holder(HOST, taken)
    assert holder is not None
    assert holder.startswith(f"pid {os.getpid()} (")
    assert len(holder) < 90


def test_a_port_left_in_time_wait_counts_as_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        client = socket.create_connection((HOST, port))
        server, _ = listener.accept()
        server.close()  # the side that closes first lingers
        client.close()
    assert port_holder(HOST, port) is None


def test_an_address_of_another_machine_is_not_called_taken() -> None:
    assert port_holder("192.0.2.1", 8000) is None
    assert bind_error("192.0.2.1", 8000) is not None
    assert bind_error(HOST, free_port(HOST)) is None


def test_a_taken_port_is_no_bind_error(taken: int) -> None:
    assert bind_error(HOST, taken) is None


def test_a_wrong_host_is_an_error_not_a_loop() -> None:
    with pytest.raises(OSError):
        free_port("192.0.2.1")
