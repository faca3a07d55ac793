"""Names are looked up without anybody having to wait for a resolver that does not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from skyctl.http.connections import KeptConnections, addresses
from skyctl.http.transport import CannotConnect
from tests.unit.http.byte_servers import byte_server, request

NAME = "gpu7.example"


def resolver(monkeypatch: pytest.MonkeyPatch, *known_addresses: str) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert host == NAME
        if not known_addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, 0, "", (address, port)) for address in known_addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_resolver_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks meanwhile shares the lookup."""
    answers, calls = threading.Event(), list[str]()

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        calls.append(host)
        answers.wait(10)
        calls.append("answered")
        return []

    async def two() -> None:
        both = asyncio.gather(addresses(NAME, 80), addresses(NAME, 80))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(both, 0.05)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        asyncio.run(two())
        assert calls == [NAME]
    finally:
        answers.set()


async def test_a_connection_goes_to_the_first_address_that_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver(monkeypatch, "127.0.0.9", "127.0.0.1")
    connections = KeptConnections()
    with byte_server() as server:
        sent = request(server.url.replace("127.0.0.1", NAME))
        assert (await server.serve(connections, sent, fresh=True)).status == 200
        await connections.aclose()


async def test_a_name_that_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver(monkeypatch)
    with pytest.raises(CannotConnect, match="not known"):
        await KeptConnections().send(request(f"http://{NAME}:1"), timeout_s=5)


async def test_a_lookup_for_which_there_is_no_thread_hinders_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver(monkeypatch, "127.0.0.1")
    with monkeypatch.context() as full, pytest.raises(CannotConnect, match="new thread"):
        full.setattr(threading.Thread, "start", start)
        await KeptConnections().send(request(f"http://{NAME}:1"), timeout_s=5)
    assert await asyncio.wait_for(addresses(NAME, 1), 5) == ["127.0.0.1"]
