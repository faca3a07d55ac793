"""What an engine core that vLLM's API server forks must not keep."""

from __future__ import annotations

import multiprocessing
import socket

import pytest

from skyctl.engines.vllm.inside.serve import give_up_ports


@pytest.mark.parametrize("listens", ["before", "after"])
def test_a_port_is_closed_once_its_api_server_is_gone(listens: str) -> None:
    """vLLM binds its port before it forks, and listens afterwards."""
    ended, told = multiprocessing.Pipe()
    server = socket.create_server(("127.0.0.1", 0)) if listens == "before" else socket.socket()
    with server, socket.socket(socket.AF_UNIX) as other:
        if listens == "after":
            server.bind(("127.0.0.1", 0))

        def core() -> None:
            give_up_ports()
            told.send(other.getsockname())
            told.recv()

        child = multiprocessing.get_context("fork").Process(target=core, daemon=True)
        child.start()
        server.listen()
        address = server.getsockname()
        assert ended.recv() == ""  # other sockets are left alone
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    ended.send("end")
    child.join()
    assert child.exitcode == 0
