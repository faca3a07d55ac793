"""The transport under ControlClient, against servers that speak bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from skyctl.control.transport import OneShotTransport


class Spoken:
    """What a server of bytes heard, and how many connections were open at once."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.open = self.most = 0
        self.arrived = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()
        self.go_on.set()


@contextlib.asynccontextmanager
async def speaking(answer: bytes) -> AsyncIterator[tuple[str, Spoken]]:
    """A server that reads once, answers with `answer` when told to go on, and hangs up."""
    spoken = Spoken()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spoken.open += 1
        spoken.most = max(spoken.most, spoken.open)
        spoken.heard.append(await reader.read(65536))
        spoken.arrived.release()
        await spoken.go_on.wait()
        spoken.open -= 1
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", spoken


def client(max_connections: int = 8) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=OneShotTransport(max_connections=max_connections))


async def test_a_chunked_answer_and_a_body_that_was_sent_arrive_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = head + b"2\r\n[1\r\n2\r\n,2\r\n1\r\n]\r\n0\r\n\r\n"
    async with speaking(answer) as (url, spoken), client() as http:
        response = await http.post(f"{url}/x", params={"mode": "keep"}, json={"a": 1})
    assert response.json() == [1, 2]
    assert spoken.heard[0].startswith(b"POST /x?mode=keep HTTP/1.1\r\n")
    assert spoken.heard[0].endswith(b'{"a":1}')


async def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async with speaking(b"HTTP/1.1 500 Oops\r\n\r\nwhole") as (url, _), client() as http:
        response = await http.get(url)
    assert (response.status_code, response.text) == (500, "whole")


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"SSH-2.0-OpenSSH\r\n\r\n"]
)
async def test_half_an_answer_or_another_protocol_is_an_error(answer: bytes) -> None:
    async with speaking(answer) as (url, _), client() as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(url)


async def test_nobody_listening_is_a_connect_error_with_a_reason() -> None:
    async with speaking(b"") as (url, _):
        pass
    async with client() as http:
        with pytest.raises(httpx.ConnectError, match=r"refused|Connect call failed"):
            await http.get(url)


async def test_no_more_connections_are_open_than_allowed() -> None:
    async with speaking(b"HTTP/1.1 204 \r\n\r\n") as (url, spoken), client(2) as http:
        spoken.go_on.clear()
        calls = [asyncio.create_task(http.get(url)) for _ in range(5)]
        for _ in range(2):
            await spoken.arrived.acquire()
        spoken.go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [204] * 5
    assert spoken.most == 2
