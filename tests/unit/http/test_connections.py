"""Which connection a request goes over: a kept one only while it lives, and each is sent once."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Answer, CannotConnect, ConnectionBroke, NoAnswer, Unusable
from tests.unit.http.byte_servers import OK, ByteServer, byte_server, in_thread, request
from tests.unit.http.certificates import make_certificate


async def test_two_requests_go_over_one_connection() -> None:
    connections = KeptConnections()
    with byte_server() as server:
        for fresh in (True, False):
            answer = await server.serve(connections, request(server.url), fresh=fresh)
            assert (answer.status, answer.reason, answer.body) == (200, "OK", b"{}")
        assert len(server.accepted) == 1
        await connections.aclose()
        assert await asyncio.to_thread(server.accepted[0].recv, 1) == b""


async def test_a_request_is_written_as_servers_expect_it() -> None:
    connections = KeptConnections()
    with byte_server() as server:
        sent = request(
            server.url + "/prefix", path="/x?a=1", headers={"authorization": "Bearer t"}, body=b"{}"
        )
        await server.serve(connections, sent, fresh=True)
        await connections.aclose()
    line, *headers = server.heard[0].decode().partition("\r\n\r\n")[0].split("\r\n")
    assert line == "POST /prefix/x?a=1 HTTP/1.1"
    assert {"authorization: Bearer t", "content-length: 2"} < set(headers)
    assert f"host: 127.0.0.1:{server.port}" in headers
    assert server.heard[0].endswith(b"\r\n\r\n{}")


async def test_a_user_and_password_in_the_url_are_sent_unless_there_is_a_token() -> None:
    connections = KeptConnections()
    with byte_server() as server:
        url = server.url.replace("://", "://me:p%40ss@")
        await server.serve(connections, request(url), fresh=True)
        token = {"authorization": "Bearer t"}
        await server.serve(connections, request(url, headers=token), fresh=False)
        await connections.aclose()
    assert b"authorization: Basic bWU6cEBzcw==\r\n" in server.heard[0]
    assert b"Basic" not in server.heard[1] and b"Bearer t" in server.heard[1]


NOT_KEPT = {
    "an error": b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\n{}",
    "its last answer": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "more than was asked for": OK + OK.replace(b"\r\n\r\n", b"\r\nx-second: 1\r\n\r\n"),
    "garbage after it": OK + b"\0\1garbage",
}


@pytest.mark.parametrize("answer", NOT_KEPT.values(), ids=NOT_KEPT)
async def test_a_connection_is_not_used_again_after(answer: bytes) -> None:
    connections = KeptConnections()
    with byte_server() as server:
        got = await server.serve(connections, request(server.url), answer, fresh=True)
        assert got.body == b"{}" and "x-second" not in got.headers
        await server.serve(connections, request(server.url), fresh=True)
        await connections.aclose()


async def test_a_connection_that_was_idle_for_too_long_is_not_used_again() -> None:
    connections = KeptConnections(keep_idle_s=0.0)
    with byte_server() as server:
        for _ in range(2):
            await server.serve(connections, request(server.url), fresh=True)
        assert len(server.accepted) == 2
        await connections.aclose()


@pytest.mark.parametrize(
    "meanwhile",
    [lambda server: server.accepted[0].close(), lambda server: server.send(b"HTTP/1.1 408 x\r\n")],
    ids=["closed", "spoke"],
)
async def test_an_end_that_the_event_loop_has_not_seen_costs_no_request(
    meanwhile: Callable[[ByteServer], None],
) -> None:
    connections = KeptConnections()
    with byte_server() as server:
        await server.serve(connections, request(server.url), fresh=True)
        meanwhile(server)  # the loop has not turned since
        answer = await server.serve(connections, request(server.url, path="/resume"), fresh=True)
        assert answer.status == 200
        assert [heard.split()[1] for heard in server.heard] == [b"/pause", b"/resume"]
        await connections.aclose()


async def test_a_server_that_was_restarted_gets_the_request_once() -> None:
    connections = KeptConnections()
    with byte_server() as before:
        await before.serve(connections, request(before.url), fresh=True)
    with byte_server(before.port) as after:
        await after.serve(connections, request(after.url), fresh=True)
        assert len(after.heard) == 1 and after.nobody_waits()
        await connections.aclose()


async def test_a_post_whose_kept_connection_breaks_under_it_is_not_sent_again() -> None:
    connections = KeptConnections()
    with byte_server() as server:
        await server.serve(connections, request(server.url), fresh=True)
        with pytest.raises(ConnectionBroke, match="before the whole answer"):
            await server.serve(connections, request(server.url), b"", fresh=False, hang_up=True)
        assert len(server.heard) == 2 and server.nobody_waits()


async def test_a_cancelled_request_takes_its_connection_with_it() -> None:
    connections = KeptConnections()
    with byte_server() as server:
        sending = asyncio.create_task(connections.send(request(server.url), timeout_s=10))
        await in_thread(lambda: (server.accept(), server.receive())[1])
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert await asyncio.to_thread(server.accepted[0].recv, 1) == b""
        await server.serve(connections, request(server.url), fresh=True)
        await connections.aclose()


async def test_no_more_connections_are_open_than_allowed() -> None:
    connections = KeptConnections(max_connections=2)
    with byte_server() as server:
        calls = [
            asyncio.create_task(connections.send(request(server.url), timeout_s=10))
            for _ in range(3)
        ]
        await in_thread(
            lambda: (server.accept(), server.receive(), server.accept(), server.receive())[1]
        )
        assert server.nobody_waits()
        await in_thread(lambda: (server.send(OK), server.receive(), server.send(OK))[1])
        server.accepted[0].sendall(OK)
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 3
        await connections.aclose()
    assert len(server.accepted) == 2


async def test_every_wait_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an answer that drips, for a free connection, and for a new one."""
    connections = KeptConnections(max_connections=1)
    with byte_server() as server:
        first = asyncio.create_task(connections.send(request(server.url), timeout_s=0.2))
        await in_thread(lambda: (server.accept(), server.receive(), server.send(OK[:30]))[1])
        with pytest.raises(NoAnswer, match="no connection in time"):
            await asyncio.wait_for(connections.send(request(server.url), timeout_s=0.01), 5)
        with pytest.raises(NoAnswer, match="no answer in time"):
            await asyncio.wait_for(first, 5)
        assert await asyncio.to_thread(server.accepted[0].recv, 1) == b""
        await server.serve(connections, request(server.url), fresh=True)
        await connections.aclose()

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    with pytest.raises(NoAnswer, match="no connection in time"):
        await asyncio.wait_for(connections.send(request(server.url), timeout_s=0.01), 5)


async def test_an_answered_request_is_never_late_and_hides_no_other_that_is() -> None:
    connections = KeptConnections()
    with byte_server() as server, byte_server() as silent:
        sending = asyncio.create_task(connections.send(request(server.url), timeout_s=0.1))
        waiting = asyncio.create_task(connections.send(request(silent.url), timeout_s=0.2))
        await in_thread(lambda: (server.accept(), server.receive(), server.send(OK))[1])
        assert (await sending).is_success
        # the same connection, with a later deadline: the first one passes meanwhile
        again = asyncio.create_task(connections.send(request(server.url), timeout_s=5.0))
        with pytest.raises(NoAnswer, match="no answer in time"):
            await asyncio.wait_for(waiting, 5)
        assert not again.done()
        await in_thread(lambda: (server.receive(), server.send(OK))[1])
        assert (await again).is_success and len(server.accepted) == 1
        await connections.aclose()


async def test_a_kept_connection_makes_room_for_another_server() -> None:
    connections = KeptConnections(max_connections=1)
    with byte_server() as server, byte_server() as other:
        await server.serve(connections, request(server.url), fresh=True)
        await other.serve(connections, request(other.url), fresh=True)
        assert await asyncio.to_thread(server.accepted[0].recv, 1) == b""
        await connections.aclose()


def test_a_connection_of_a_closed_event_loop_is_not_used() -> None:
    connections = KeptConnections()
    with byte_server() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the first one, which nobody closed
        for _ in range(2):
            asyncio.run(server.serve(connections, request(server.url), fresh=True))
        asyncio.run(connections.aclose())
        gc.collect()


async def test_nobody_listening_is_said() -> None:
    with byte_server() as server:
        pass
    with pytest.raises(CannotConnect, match=r"refused|Connect call failed"):
        await KeptConnections().send(request(server.url), timeout_s=10)


@pytest.mark.parametrize(
    ("url", "path", "headers"),
    [
        ("http://127.0.0.1:99999", "/x", {}),
        ("ftp://127.0.0.1", "/x", {}),
        ("ftp://127.0.0.1:{port}", "/x", {}),
        ("http://127.0.0.1:{port}", "/x\r\nHost: other", {}),
        ("http://127.0.0.1:{port}", "/x", {"authorization": "Bearer s3cret\r\nx: y"}),
    ],
)
async def test_what_http_cannot_carry_is_refused_before_anything_is_sent(
    url: str, path: str, headers: dict[str, str]
) -> None:
    with byte_server() as server:
        refused = request(url.format(port=server.port), path=path, headers=headers)
        with pytest.raises(Unusable) as caught:
            await KeptConnections().send(refused, timeout_s=10)
        assert "s3cret" not in str(caught.value)
        assert server.nobody_waits()


async def _served(
    connections: KeptConnections, url: str, start: Callable[..., Awaitable[asyncio.Server]]
) -> list[Answer]:
    """Two answers of an asyncio server, and how many connections it took, as a header."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nx-opened: %d\r\ncontent-length: 0\r\n\r\n" % opened)

    server = await start(serve)
    port = next((s.getsockname()[1] for s in server.sockets if s.family is socket.AF_INET), 0)
    sent = request(url.format(port=port), method="GET")
    answers = [await connections.send(sent, timeout_s=10) for _ in range(2)]
    await connections.aclose()
    server.close()
    return answers


async def test_a_unix_socket_is_asked_whatever_the_url_says(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    answers = await _served(
        KeptConnections(unix_socket=path),
        "http://supervisor",
        lambda serve: asyncio.start_unix_server(serve, path),
    )
    assert [answer.headers["x-opened"] for answer in answers] == ["1", "1"]


async def test_https_is_spoken_with_whom_the_context_trusts_and_with_nobody_else(
    tmp_path: Path,
) -> None:
    certificate = make_certificate(tmp_path)
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(certificate)
    ours = ssl.create_default_context(cafile=certificate)

    async def start(serve: Callable[..., Awaitable[None]]) -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs)

    url = "https://127.0.0.1:{port}"
    answers = await _served(KeptConnections(tls=ours), url, start)
    assert [answer.headers["x-opened"] for answer in answers] == ["1", "1"]
    with pytest.raises(CannotConnect, match=r"(?i)certificate"):
        await _served(KeptConnections(), url, start)
