"""The pool of connections for control calls: it opens one when no kept one can be reused.

A kept connection is reused only while it is certainly alive: idle for less than `KEEP_IDLE_S` (vLLM
closes its own after 5 s), after a successful response (vLLM closes after a 500), in the event loop
that opened it, and with nothing to read on its socket, not even EOF. A server that restarted
therefore costs a new connection, not a request; no request is ever sent twice.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import resource
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

from skyctl import __version__
from skyctl.http.connection import Connection
from skyctl.http.transport import (
    Answer,
    CannotConnect,
    NoAnswer,
    Request,
    Unusable,
)

_Key = tuple[asyncio.AbstractEventLoop, str, int]

_running: dict[_Key, asyncio.Future[Sequence[str]]] = {}
"""One for each name: while a resolver does not answer, each probe asks again."""


async def addresses(host: str, port: int) -> Sequence[str]:
    """Every address of a host name, in order. Raises OSError, or ValueError for an invalid name.

    The lookup has a thread that may be left behind: asyncio's are waited for at the end of a
    command, so that a resolver without an answer held up Ctrl-C, and every deadline.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return [host]
    key = asyncio.get_running_loop(), host, port
    if key not in _running:
        _running[key] = key[0].create_future()
        named = f"lookup of {host}"
        try:
            threading.Thread(target=_resolve, args=(key,), name=named, daemon=True).start()
        except RuntimeError as error:  # too many threads or processes now
            del _running[key]
            raise OSError(f"{named}: {error}") from error
    return await asyncio.shield(_running[key])


def _resolve(key: _Key) -> None:
    loop, host, port = key
    addresses: list[str] = []
    failed: Exception | None = None
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in answers))
    except (OSError, ValueError, OverflowError) as error:
        failed = error
    try:
        loop.call_soon_threadsafe(_complete, key, addresses, failed)
    except RuntimeError:  # it is closed
        _running.pop(key, None)


def _complete(key: _Key, addresses: Sequence[str], failed: Exception | None) -> None:
    answer = _running.pop(key)
    if failed is not None:
        answer.set_exception(failed)
        answer.exception()  # seen, even if no task waits any more
    else:
        answer.set_result(addresses)


T = TypeVar("T")


KEEP_IDLE_S = 2.0
_BUFFER_BYTES = 64 * 1024
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PATH, _HEADER_VALUE = re.compile(r"/[\x21-\x7e]*"), re.compile(r"[\x20-\x7e]*")
# files that a process keeps open beside its connections
_OTHER_FILES = 256
_MOST, _FEWEST = 4096, 16


class _Server:
    """One server by its URL: `headers` are those of every request, `path` prefixes its paths.

    `basic` is the Authorization for a user and password in the URL, or empty. Raises Unusable.
    """

    def __init__(self, url: str) -> None:
        self.idle: list[Connection] = []
        try:
            parts = urlsplit(url)
            usual, host = _DEFAULT_PORTS[parts.scheme], parts.hostname or ""
            self.port = parts.port or usual
            self.host = host if host.isascii() else host.encode("idna").decode()
        except (ValueError, KeyError) as error:
            raise Unusable("its URL is none of HTTP") from error
        self.tls = parts.scheme == "https"
        self.path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._")
        named = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != usual:
            named += f":{self.port}"
        self.headers = (
            f"host: {named}\r\nuser-agent: skyctl/{__version__}\r\n"
            "accept: */*\r\naccept-encoding: identity\r\n"
        )
        self.basic = ""
        if parts.username or parts.password:
            credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            self.basic = f"Basic {base64.b64encode(credentials.encode()).decode()}"


class KeptConnections:
    """Sends each request over a connection to its server. A `Transport`.

    At most `max_connections` are open at once (by default what the limit of open files allows);
    further requests wait. With `unix_socket` all go there, whatever their URL says. `keep_idle_s`
    is how long an idle connection is kept; `tls` replaces the TLS trust.
    """

    def __init__(
        self,
        *,
        max_connections: int | None = None,
        unix_socket: str | None = None,
        keep_idle_s: float = KEEP_IDLE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        by_open_files = soft - _OTHER_FILES if soft >= 0 else _MOST
        self._most = max_connections or max(_FEWEST, min(_MOST, by_open_files))
        self._used = 0
        self._idle: dict[Connection, _Server] = {}  # oldest first
        self._slots = asyncio.Semaphore(self._most)
        self._unix_socket, self._keep_idle_s = unix_socket, keep_idle_s
        self._servers: dict[str, _Server] = {}
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._tls = tls

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        """Send `request` once and return the response. See `Transport`."""
        until = asyncio.get_running_loop().time() + timeout_s
        if request.url not in self._servers:
            self._servers[request.url] = _Server(request.url)
        server = self._servers[request.url]
        written = _written(server, request)
        if self._slots.locked():
            await _in_time(until, self._slots.acquire())
        else:
            await self._slots.acquire()  # at once
        self._used += 1
        try:
            connection = self._take(server)
            if connection is None:
                connection = await _in_time(until, self._open(server))
            deadline = connection.loop.call_at(until, connection.late)
            try:
                answer = await connection.exchange(written)
            finally:
                deadline.cancel()
        finally:
            self._used -= 1
            self._slots.release()
        self._keep(server, connection, answer)
        return answer

    async def aclose(self) -> None:
        """Close every kept connection."""
        while self._idle:
            self._close_oldest()
        await asyncio.sleep(0)  # they close with the next turn of the event loop

    def _take(self, server: _Server) -> Connection | None:
        """A kept connection that is certainly alive, or None."""
        loop = asyncio.get_running_loop()
        while server.idle:
            connection = server.idle.pop()
            del self._idle[connection]
            if connection.loop is not loop:
                continue  # closed with its loop
            if loop.time() - connection.free_since < self._keep_idle_s and connection.is_fresh():
                return connection
            connection.close()
        return None

    def _keep(self, server: _Server, connection: Connection, answer: Answer) -> None:
        if not answer.is_success or not connection.may_be_kept():
            connection.close()
            return
        connection.free_since = connection.loop.time()
        server.idle.append(connection)
        self._idle[connection] = server

    def _forget(self, server: _Server, connection: Connection) -> None:
        """Drop a connection that was closed, by either side."""
        if self._idle.pop(connection, None) is not None:
            server.idle.remove(connection)

    def _close_oldest(self) -> None:
        connection, server = next(iter(self._idle.items()))
        self._forget(server, connection)
        if connection.loop is asyncio.get_running_loop():
            connection.close()

    async def _open(self, server: _Server) -> Connection:
        """Raises CannotConnect."""
        if self._idle and self._used + len(self._idle) > self._most:
            self._close_oldest()
        make = partial(Connection, self._buffer, partial(self._forget, server))
        try:
            if self._unix_socket is None:
                return await self._connect(make, server)
            loop = asyncio.get_running_loop()
            return (await loop.create_unix_connection(make, self._unix_socket))[1]
        except OSError as error:
            raise CannotConnect(error.strerror or str(error)) from error
        except ValueError as error:  # a name that cannot be looked up
            raise CannotConnect(str(error)) from error

    async def _connect(self, make: Callable[[], Connection], server: _Server) -> Connection:
        """To the first address that takes it. Raises OSError, or ValueError as `addresses`."""
        loop, refused = asyncio.get_running_loop(), OSError("it has no address")
        tls, name = (self._trusted(), server.host) if server.tls else (None, None)
        for address in await addresses(server.host, server.port):
            try:
                _, connection = await loop.create_connection(
                    make, address, server.port, ssl=tls, server_hostname=name
                )
                return connection
            except ssl.SSLError:
                raise
            except OSError as error:
                refused = error
        raise refused

    def _trusted(self) -> ssl.SSLContext:
        """TLS trust: the system's CA store plus certifi."""
        if self._tls is None:
            import certifi

            self._tls = ssl.create_default_context()
            self._tls.load_verify_locations(certifi.where())
        return self._tls


async def _in_time(until: float, work: Awaitable[T]) -> T:
    """Await, or raise NoAnswer if `until` comes first on the event loop's clock."""
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError as error:
        raise NoAnswer("no connection in time") from error


def _written(server: _Server, request: Request) -> bytes:
    """The request's bytes. Raises Unusable for text that would break out of its line."""
    if not _PATH.fullmatch(request.path):
        raise Unusable("its path has characters that HTTP cannot carry")
    lines = [f"{request.method} {server.path}{request.path} HTTP/1.1\r\n{server.headers}"]
    if server.basic and "authorization" not in request.headers:
        lines.append(f"authorization: {server.basic}\r\n")
    for name, value in request.headers.items():
        if not _HEADER_VALUE.fullmatch(value):
            raise Unusable(f"the value of its {name} has characters that HTTP cannot carry")
        lines.append(f"{name}: {value}\r\n")
    if request.body is not None or request.method != "GET":
        lines.append(f"content-length: {len(request.body or b'')}\r\n")
    return "".join((*lines, "\r\n")).encode("ascii") + (request.body or b"")
