"""How two processes show each other over a network that they know one secret:

    server                                client
    challenge S  ───────────────────────►
                 ◄─────────────────────── challenge C, HMAC(secret, "rank" S C)
    HMAC(secret, "store" S C) ──────────►

A process that cannot gets no answer, and is disconnected. What follows is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket

SECRET_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0
_MOST_STRANGERS = 64
"""Connections beside the expected ones that may have proven nothing yet; more are refused."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""After so many seconds without an answer, the other machine counts as gone; the last, in
milliseconds, where something was sent, of which the kernel asks no probes.
"""


class Door:
    """The server's end, for `expected` clients."""

    def __init__(self, secret: bytes, *, expected: int, timeout_s: float) -> None:
        self._secret = secret
        self._timeout_s = timeout_s
        self._most = expected + _MOST_STRANGERS
        self._strangers = 0

    async def admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether a client knows the secret. Raises OSError, EOFError or TimeoutError."""
        if self._strangers >= self._most:
            return False
        self._strangers += 1
        try:
            async with asyncio.timeout(min(HANDSHAKE_TIMEOUT_S, self._timeout_s)):
                ours = secrets.token_bytes(PROOF_BYTES)
                writer.write(ours)
                theirs = await reader.readexactly(PROOF_BYTES)
                proof = await reader.readexactly(PROOF_BYTES)
        finally:
            self._strangers -= 1
        if not hmac.compare_digest(proof, proof_of(self._secret, b"rank", ours, theirs)):
            return False
        writer.write(proof_of(self._secret, b"store", ours, theirs))
        return True


class Proof:
    """The client's end: what it answers a challenge with, and what it must then be answered."""

    def __init__(self, secret: bytes, challenge: bytes) -> None:
        ours = secrets.token_bytes(PROOF_BYTES)
        self.message = ours + proof_of(secret, b"rank", challenge, ours)
        self._expected = proof_of(secret, b"store", challenge, ours)

    def accepts(self, answer: bytes) -> bool:
        """Whether the server has shown that it knows the secret."""
        return hmac.compare_digest(answer, self._expected)


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove to a server that this process knows the secret, and have it do so too.

    Raises:
        OSError, EOFError: it cannot, has let go of the connection, or took too long.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        proof = Proof(secret, await reader.readexactly(PROOF_BYTES))
        writer.write(proof.message)
        if not proof.accepts(await reader.readexactly(PROOF_BYTES)):
            raise ConnectionError("the process at that address does not know the secret")


def keep_alive(connection: socket.socket) -> None:
    """Have the end of the other machine end the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def proof_of(secret: bytes, *parts: bytes) -> bytes:
    """Shows that a process knows the secret, and for this occasion alone."""
    return hmac.digest(secret, b"".join(parts), "sha256")
