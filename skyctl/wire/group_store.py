"""Where the ranks of a group find each other: a small store of bytes that asks for a secret.

The sender serves it, at an ephemeral port. Each side proves to the other that it knows the secret
(`wire/proofs.py`), and then:

    store                                 rank
                 ◄─────────────────────── set key value, or get key …
    nothing, or the value once there is one ►

Messages have limits, waits have
deadlines, nothing is unpickled, and once the group has formed the store is closed, or sealed for
those that stay: their connection ends with the sender's process, on whatever machine that is.
torch's own serves every process that connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skyctl.store.owned import own
from skyctl.wire.proofs import PROOF_BYTES, Door, Proof, keep_alive

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0
_LONGEST_KEY = 256
_LONGEST_VALUE = 1024 * 1024  # gloo's address of one rank is 170 bytes, and 8 more for each other
_REQUEST = struct.Struct(">BHI")  # operation, length of the key, length of the value
_ANSWER = struct.Struct(">I")
_SET, _GET, _STAY = range(3)


class _Connection:
    """A rank's, which a forked child does not keep open."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._socket = writer.get_extra_info("socket")
        own(self)

    def fileno(self) -> int:
        return int(self._socket.fileno())


class GroupStore:
    """The sender's end: serves `ranks` others in a thread of its own, until it is closed."""

    def __init__(self, address: str, secret: bytes, *, ranks: int, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        self.port: int = listening.getsockname()[1]
        self._door = Door(secret, expected=ranks, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._sealed = asyncio.Event()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listening,), name="group-store", daemon=True
        )
        self._thread.start()

    def set(self, key: str, value: bytes) -> None:
        self._in_loop(self._put(key, value))

    def get(self, key: str) -> bytes:
        """The value, once a rank has set it. Raises TimeoutError."""
        return self._in_loop(self._value(key))

    def seal(self) -> None:
        """Refuse connections from now on: the group has formed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._sealed.set)

    def close(self) -> None:
        """Seal it, and let go of all ranks; may be called twice."""
        self.seal()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise ConnectionError("the group's store is closed") from error
        return future.result(self._timeout_s + _CLOSE_TIMEOUT_S)

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._meet, sock=listening)
        await self._sealed.wait()
        server.close()
        await self._closed.wait()  # the runner cancels what is under way

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # it ended, took too long, or is no rank: none of it is this group's business
        let_go = (OSError, EOFError, TimeoutError, ValueError, asyncio.CancelledError)
        with contextlib.suppress(*let_go):
            connection = _Connection(writer)
            try:
                if await self._door.admits(reader, writer):
                    while not await self._answer(reader, writer):
                        pass
                    await reader.read(1)  # it stays, and says no more
            finally:
                del connection
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the rank stays and asks no more."""
        async with asyncio.timeout(self._timeout_s):
            request = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
            operation, key_bytes, value_bytes = request
            if key_bytes > _LONGEST_KEY or value_bytes > _LONGEST_VALUE:
                raise ValueError("a message is too large")
            key = (await reader.readexactly(key_bytes)).decode()
            value = await reader.readexactly(value_bytes)
            if operation == _SET:
                await self._put(key, value)
                answer = b""
            elif operation == _GET:
                answer = await self._value(key)
            elif operation == _STAY:
                answer = b""
            else:
                raise ValueError(f"operation {operation} is unknown")
            writer.write(_ANSWER.pack(len(answer)) + answer)
            await writer.drain()
        return bool(operation == _STAY)

    async def _put(self, key: str, value: bytes) -> None:
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def _value(self, key: str) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s), self._changed:
                await self._changed.wait_for(lambda: key in self._values)
        except TimeoutError as error:
            raise TimeoutError(f"not every rank has joined in {self._timeout_s:g} s") from error
        return self._values[key]


class GroupStoreClient:
    """A rank's connection to the sender's store. All that is done with it ends by one deadline.

    `address` is this machine's, on the way to the sender.

    Raises:
        OSError: the sender cannot be reached, has let go of the connection, or took too long.
        RuntimeError: a process answers there that does not know the secret.
    """

    def __init__(self, host: str, port: int, secret: bytes, *, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        # it listens before ranks learn its address: if it refuses, the sender has died
        self._socket = socket.create_connection((host, port), timeout_s)
        try:
            self.address: str = self._socket.getsockname()[0]
            self._prove(secret)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        self._ask(_SET, key, value)

    def get(self, key: str) -> bytes:
        return self._ask(_GET, key)

    def stay(self, on_end: Callable[[], object]) -> None:
        """Keep the connection, and call `on_end`, in a thread, once it has ended: by `close`, or
        because the sender has closed its store, has ended, or its machine does not answer.
        """
        self._ask(_STAY, "")
        self._socket.settimeout(None)
        keep_alive(self._socket)

        def wait() -> None:
            with contextlib.suppress(OSError):
                self._socket.recv(1)
            self._socket.close()
            on_end()

        threading.Thread(target=wait, name="group-store-stay", daemon=True).start()

    def close(self) -> None:
        """May be called twice."""
        with contextlib.suppress(OSError):  # a thread that reads it wakes up
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _prove(self, secret: bytes) -> None:
        proof = Proof(secret, self._receive(PROOF_BYTES))
        self._send(proof.message)
        if not proof.accepts(self._receive(PROOF_BYTES)):
            raise RuntimeError("the process at the sender's address is not this push's sender")

    def _ask(self, operation: int, key: str, value: bytes = b"") -> bytes:
        name = key.encode()
        self._send(_REQUEST.pack(operation, len(name), len(value)) + name + value)
        (answer_bytes,) = _ANSWER.unpack(self._receive(_ANSWER.size))
        if answer_bytes > _LONGEST_VALUE:
            raise RuntimeError(f"the sender's store answers with {answer_bytes} bytes")
        return self._receive(answer_bytes)

    def _send(self, data: bytes) -> None:
        self._await()
        self._socket.sendall(data)

    def _receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._await()
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionError("the sender's store has let go of the connection")
            data += piece
        return bytes(data)

    def _await(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("not every rank has joined in time")
        self._socket.settimeout(left_s)
