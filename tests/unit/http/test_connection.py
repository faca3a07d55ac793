"""One connection: what counts as an answer, however it is cut into pieces."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from skyctl.http import connection as module
from skyctl.http.connection import Connection
from skyctl.http.transport import Answer, ConnectionBroke, TransportError, Unusable


class Wire(asyncio.Transport):
    """The other end of one connection, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False
        self.lost: list[Connection] = []
        buffer = memoryview(bytearray(65536))
        self.connection = Connection(buffer, self.lost.append)
        self.connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closed

    def ask(self) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.connection.exchange(b"GET /"))

    async def answers(self, pieces: Sequence[bytes], *, then_ends: bool = False) -> Answer:
        """What the connection makes of an answer that arrives in these pieces."""
        asking = self.ask()
        await asyncio.sleep(0)
        for piece in pieces:
            if not self.closed:
                self.connection.get_buffer(-1)[: len(piece)] = piece
                self.connection.buffer_updated(len(piece))
        if then_ends and not self.closed:
            self.connection.eof_received()
            self.abort()
        async with asyncio.timeout(5):
            return await asking


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKS = b"2\r\n[1\r\n2\r\n,2\r\n1\r\n]\r\n0\r\n\r\n"
WHOLE = {
    "a length": (HEAD + b"Content-Length: 5\r\n\r\n[1,2]", b"[1,2]"),
    "chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS, b"[1,2]"),
    "nothing": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "a length of zero": (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", b""),
    "100 before": (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 1\r\n\r\n1", b"1"),
    "hints before": (
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + HEAD + b"content-length: 1\r\n\r\n1",
        b"1",
    ),
}


@pytest.mark.parametrize(("answer", "body"), WHOLE.values(), ids=WHOLE)
async def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes, body: bytes) -> None:
    status = int(answer.rpartition(b"HTTP/1.1 ")[2][:3])
    for cut in range(1, len(answer)):
        parsed = await Wire().answers([answer[:cut], answer[cut:]])
        assert (parsed.status, parsed.body) == (status, body)
        assert "link" not in parsed.headers
    parsed = await Wire().answers([bytes([byte]) for byte in answer])
    assert (parsed.status, parsed.body) == (status, body)


async def test_without_a_length_the_answer_ends_with_the_connection() -> None:
    wire = Wire()
    parsed = await wire.answers([b"HTTP/1.1 500 Oops\r\n\r\nwho", b"le"], then_ends=True)
    assert (parsed.status, parsed.reason, parsed.body) == (500, "Oops", b"whole")
    assert wire.lost == [] or wire.lost == [wire.connection]
    assert not wire.connection.is_fresh()


HALF = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
    "no last chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n[]\r\n",
    "only an interim one": b"HTTP/1.1 100 Continue\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "two lengths": HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    "a length and chunks": HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\nx",
    "a length that is none": HEAD + b"content-length: -1\r\n\r\nx",
}


@pytest.mark.parametrize("answer", HALF.values(), ids=HALF)
async def test_half_an_answer_or_another_protocol_is_a_broken_connection(answer: bytes) -> None:
    with pytest.raises(ConnectionBroke):
        await Wire().answers([answer] if answer else [], then_ends=True)


async def test_a_reset_is_a_broken_connection_and_says_so() -> None:
    wire = Wire()
    asking = wire.ask()
    await asyncio.sleep(0)
    wire.connection.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(ConnectionBroke, match="reset by peer"):
        await asking
    assert wire.lost[0] is wire.connection


async def test_an_answer_beyond_all_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(module, "MAX_HEAD_BYTES", 1000)
    endless = [
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
        *[b"64\r\n" + b"x" * 100 + b"\r\n"] * 11,
    ]
    for pieces in (
        endless,
        [HEAD + b"x: " + b"y" * 900, b"y" * 900],
        [b"HTTP/1.1 200 " + b"K" * 600, b"K" * 600],
    ):
        wire = Wire()
        with pytest.raises(Unusable, match="1000 bytes"):
            await wire.answers(pieces)
        assert wire.closed


async def test_what_arrives_unasked_closes_the_connection() -> None:
    wire = Wire()
    wire.connection.buffer_updated(1)
    assert wire.closed and not wire.connection.is_fresh()


async def test_a_damaged_answer_is_an_answer_or_an_error_of_ours() -> None:
    dice = random.Random(1)
    answers = [answer for answer, _ in WHOLE.values()]
    kinds: set[type] = set()
    for _ in range(3000):
        damaged = bytearray(dice.choice(answers) + dice.choice([b"", *answers]))
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(damaged))
            damaged[place : place + dice.choice((0, 1, 1, 5))] = dice.randbytes(
                dice.choice((0, 1, 3))
            )
            damaged = damaged or bytearray(b"\0")
        cut = dice.randrange(len(damaged))
        pieces = [piece for piece in (bytes(damaged[:cut]), bytes(damaged[cut:])) if piece]
        try:
            kinds.add(type(await Wire().answers(pieces, then_ends=True)))
        except TransportError as error:
            kinds.add(type(error))
    assert {Answer, ConnectionBroke} <= kinds
