"""The connections under control calls: one is opened where none can be used again.

A kept connection is used only while it certainly lives: idle for less than `KEEP_IDLE_S` (vLLM's
servers close theirs after 5 s), after an answer of success (vLLM closes one after each 500), in the
event loop that opened it, and with nothing to read on its socket, not even an end. So a server that
was restarted meanwhile costs a new connection and not a request: none is ever sent twice.
"""

from __future__ import annotations

import asyncio
import base64
import re
import resource
import ssl
from functools import lru_cache, partial
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from skyctl import __version__
from skyctl.control.connection import Connection
from skyctl.control.transport import Answer, CannotConnect, Request, Unusable

KEEP_IDLE_S = 2.0
_BUFFER_BYTES = 64 * 1024
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PATH, _HEADER_VALUE = re.compile(r"/[\x21-\x7e]*"), re.compile(r"[\x20-\x7e]*")
# files that a process keeps open beside its connections
_OTHER_FILES = 256
_MOST, _FEWEST = 4096, 16


class Address(NamedTuple):
    """Where connections to one server go."""

    host: str
    port: int
    tls: bool


class Origin(NamedTuple):
    """One server as its URL tells: `headers` are those of every request, `path` begins its paths.

    `basic` is the Authorization that a user and password in the URL mean, or empty.
    """

    address: Address
    path: str
    headers: str
    basic: str


class KeptConnections:
    """Sends each request over a connection to its server. A `Transport`.

    At most `max_connections` are open at once (by default what the limit of open files allows);
    further requests wait. With `unix_socket` all go there, whatever their URL says. `keep_idle_s`
    is how long one is kept without a request; `tls` says whom https:// is believed.
    """

    def __init__(
        self,
        *,
        max_connections: int | None = None,
        unix_socket: str | None = None,
        keep_idle_s: float = KEEP_IDLE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._most = max_connections or _most_by_open_files()
        self._used = self._kept = 0
        self._slots = asyncio.Semaphore(self._most)
        self._unix_socket, self._keep_idle_s = unix_socket, keep_idle_s
        # an address without a connection is not in here; the first has waited longest
        self._idle: dict[Address, list[Connection]] = {}
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._tls = tls

    async def send(self, request: Request) -> Answer:
        """The answer to `request`, which is sent once. See `Transport`."""
        origin = _origin(request.url)
        written = _written(origin, request)
        async with self._slots:
            self._used += 1
            try:
                connection = self._take(origin.address) or await self._open(origin.address)
                answer = await connection.exchange(written)
            finally:
                self._used -= 1
            self._keep(origin.address, connection, answer)
        return answer

    async def aclose(self) -> None:
        """Close every connection that is kept."""
        while self._idle:
            self._close_oldest()
        await asyncio.sleep(0)  # they are gone with the next turn of the event loop

    def _take(self, address: Address) -> Connection | None:
        """A kept connection that certainly lives, or None."""
        loop = asyncio.get_running_loop()
        while connections := self._idle.get(address):
            connection = connections[-1]
            self._forget(address, connection)
            if connection.loop is not loop:
                continue  # closed with its loop
            if loop.time() - connection.free_since < self._keep_idle_s and connection.is_fresh():
                return connection
            connection.close()
        return None

    def _keep(self, address: Address, connection: Connection, answer: Answer) -> None:
        if not answer.is_success or not connection.is_fresh():
            connection.close()
            return
        connection.free_since = connection.loop.time()
        self._idle.setdefault(address, []).append(connection)
        self._kept += 1

    def _forget(self, address: Address, connection: Connection) -> None:
        """It is not idle any more, if it was."""
        connections = self._idle.get(address, [])
        if connection in connections:
            connections.remove(connection)
            self._kept -= 1
            if not connections:
                del self._idle[address]

    def _close_oldest(self) -> None:
        address, connections = next(iter(self._idle.items()))
        connection = connections[0]
        self._forget(address, connection)
        if connection.loop is asyncio.get_running_loop():
            connection.close()

    async def _open(self, address: Address) -> Connection:
        """Raises CannotConnect."""
        if self._idle and self._used + self._kept > self._most:
            self._close_oldest()
        loop = asyncio.get_running_loop()
        make = partial(Connection, self._buffer, partial(self._forget, address))
        try:
            if self._unix_socket is not None:
                return (await loop.create_unix_connection(make, self._unix_socket))[1]
            tls = self._trusted() if address.tls else None
            return (await loop.create_connection(make, address.host, address.port, ssl=tls))[1]
        except OSError as error:
            raise CannotConnect(error.strerror or str(error)) from error
        except ValueError as error:  # a name that cannot be looked up
            raise CannotConnect(str(error)) from error

    def _trusted(self) -> ssl.SSLContext:
        """Whom https:// is believed: the machine's own authorities, and those of certifi."""
        if self._tls is None:
            import certifi

            self._tls = ssl.create_default_context()
            self._tls.load_verify_locations(certifi.where())
        return self._tls


def _most_by_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_FEWEST, min(_MOST, soft - _OTHER_FILES if soft >= 0 else _MOST))


@lru_cache(maxsize=8192)
def _origin(url: str) -> Origin:
    """Raises Unusable."""
    try:
        parts = urlsplit(url)
        port, host = parts.port or _DEFAULT_PORTS[parts.scheme], parts.hostname or ""
        if not host.isascii():
            host = host.encode("idna").decode()
    except (ValueError, KeyError) as error:
        raise Unusable("its URL is none of HTTP") from error
    named = f"[{host}]" if ":" in host else host
    if port != _DEFAULT_PORTS[parts.scheme]:
        named += f":{port}"
    basic = ""
    if parts.username or parts.password:
        said = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        basic = f"Basic {base64.b64encode(said.encode()).decode()}"
    return Origin(
        Address(host, port, parts.scheme == "https"),
        quote(parts.path, safe="/%:@!$&'()*+,;=~-._"),
        f"host: {named}\r\nuser-agent: skyctl/{__version__}\r\n"
        "accept: */*\r\naccept-encoding: identity\r\n",
        basic,
    )


def _written(origin: Origin, request: Request) -> bytes:
    """The request as HTTP has it. Raises Unusable for what would break out of its line."""
    if not _PATH.fullmatch(request.path):
        raise Unusable("its path has characters that HTTP cannot carry")
    lines = [f"{request.method} {origin.path}{request.path} HTTP/1.1\r\n{origin.headers}"]
    if origin.basic and "authorization" not in request.headers:
        lines.append(f"authorization: {origin.basic}\r\n")
    for name, value in request.headers.items():
        if not _HEADER_VALUE.fullmatch(value):
            raise Unusable(f"the value of its {name} has characters that HTTP cannot carry")
        lines.append(f"{name}: {value}\r\n")
    if request.body is not None or request.method != "GET":
        lines.append(f"content-length: {len(request.body or b'')}\r\n")
    return "".join((*lines, "\r\n")).encode("ascii") + (request.body or b"")
