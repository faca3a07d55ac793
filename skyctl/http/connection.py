"""One HTTP/1.1 connection: one request goes out and one whole response comes in, one exchange at a
time. httptools (llhttp) parses responses; asyncio's transports carry the bytes and handle TLS and
unix sockets.

    idle ── exchange() ──► waiting ── whole answer ──► idle, if it may be used again
                              └─ end, reset, not HTTP, too much, cancelled ──► closed
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

import httptools

from skyctl.http.transport import (
    Answer,
    ConnectionBroke,
    NoAnswer,
    TransportError,
    Unusable,
)
from skyctl.store.owned import own

MAX_HEAD_BYTES = 256 * 1024


MAX_BODY_BYTES = 64 * 1024 * 1024


_NO_BODY = (204, 304)


class Connection(asyncio.BufferedProtocol):
    """Made by `loop.create_connection`. `lost` is called once, when it is closed.

    `buffer` is where bytes are received; connections of one loop may share it, because data is
    parsed as soon as it arrives.
    """

    def __init__(self, buffer: memoryview, lost: Callable[[Connection], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.free_since = 0.0  # on the loop's clock, set by the pool
        self._buffer, self._lost = buffer, lost
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._reusable = True
        self._parser = httptools.HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self._reason = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._head_bytes = self._body_bytes = 0
        self._in_body = False

    async def exchange(self, request: bytes) -> Answer:
        """Write `request` and return the whole answer to it. A cancelled exchange closes the
        connection.

        Raises:
            ConnectionBroke: it ended before the answer did. NoAnswer: `late` was called.
            Unusable: the answer is too large.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBroke("it was closed")
        self._begin()
        self._waiter = self.loop.create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None

    def late(self) -> None:
        """The deadline of the response has passed."""
        self._fail(NoAnswer("no answer in time"))

    def may_be_kept(self) -> bool:
        """Whether neither side has announced the end of the connection."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return self._reusable and open_

    def is_fresh(self) -> bool:
        """Whether the next request can use it: the server keeps it open.

        Looks at the socket itself: an EOF that the event loop has not processed yet counts as well,
        and so does anything else that arrived unasked.
        """
        if self._transport is None or not self.may_be_kept():
            return False
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not self._poll.poll(0)

    def close(self) -> None:
        """Close at once, even during an exchange."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    # --- what asyncio calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        own(self)  # a forked child would keep it open, and its other end would think that we live

    def fileno(self) -> int:
        """Its socket's descriptor, -1 once that is closed."""
        socket = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if socket is None else int(socket.fileno())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None:  # no request is under way
            self.close()
            return
        if not self._in_body:
            self._head_bytes += nbytes
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserUpgrade:
            self._fail(ConnectionBroke("it went over to another protocol"))
        except httptools.HttpParserError as error:
            self._fail(ConnectionBroke(f"not an HTTP answer: {error}"))
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(Unusable(f"the answer's headers are over {MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> None:
        self._reusable = False
        if self._waiter is not None and self._in_body and not self._framed():
            self._complete()  # without a length, the end of the connection ends the answer

    def connection_lost(self, exc: Exception | None) -> None:
        failure = str(exc) if exc else "the server closed it before the whole answer"
        self._fail(ConnectionBroke(failure))
        self._lost(self)

    # --- what httptools calls ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._reusable = False  # a second answer

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._fail(Unusable(f"the answer is over {MAX_BODY_BYTES} bytes"))
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # such as 100: the answer is still to come
            self._reason, self._headers, self._in_body = b"", {}, False
            return
        self._reusable = self._reusable and self._parser.should_keep_alive()
        self._complete()

    def _complete(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        status, reason = self._parser.get_status_code(), self._reason.decode("latin-1")
        self._waiter.set_result(Answer(status, reason, self._headers, b"".join(self._body)))
        self._begin()  # what a second answer says is not added to this one

    def _framed(self) -> bool:
        """Whether the response declares its own length."""
        coding = self._headers.get("transfer-encoding", "")
        return (
            "chunked" in coding.lower()
            or (not coding and "content-length" in self._headers)
            or self._parser.get_status_code() in _NO_BODY
        )

    def _fail(self, error: TransportError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()
