"""One connection per request, for httpx: what control calls need of HTTP, at the least cost.

httpx's own pool looks through all its connections for each request, which grows with the square of
the fleet, and it makes a TLS context that calls to http:// never use. Connections are not kept
here (see `http.py`), so there is nothing to pool.
"""

from __future__ import annotations

import asyncio
import ssl

import h11
import httpx

_READ_BYTES = 65536
_DEFAULT_PORTS = {"http": 80, "https": 443}


class OneShotTransport(httpx.AsyncBaseTransport):
    """Opens a connection for each request and closes it after the answer.

    At most `max_connections` are open at once, others wait. Has no deadlines: the caller's cancels.
    """

    def __init__(self, *, max_connections: int) -> None:
        self._slots = asyncio.Semaphore(max_connections)
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and read the whole answer.

        Raises:
            httpx.ConnectError: no connection.
            httpx.NetworkError, httpx.RemoteProtocolError: it broke, or HTTP was not spoken on it.
            httpx.LocalProtocolError: the request cannot be written as HTTP.
        """
        async with self._slots:
            reader, writer = await self._connect(request.url)
            try:
                return await _exchange(request, reader, writer)
            except OSError as error:
                raise httpx.ReadError(str(error), request=request) from error
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error), request=request) from error
            except h11.LocalProtocolError as error:
                raise httpx.LocalProtocolError(str(error), request=request) from error
            finally:
                writer.close()

    async def _connect(self, url: httpx.URL) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = None
        if url.scheme == "https":
            tls = self._tls = self._tls or httpx.create_ssl_context(trust_env=False)
        port = url.port or _DEFAULT_PORTS[url.scheme]
        try:
            return await asyncio.open_connection(url.host, port, ssl=tls)
        except OSError as error:
            raise httpx.ConnectError(error.strerror or str(error)) from error


async def _exchange(
    request: httpx.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> httpx.Response:
    connection = h11.Connection(h11.CLIENT)
    head = h11.Request(
        method=request.method, target=request.url.raw_path, headers=request.headers.raw
    )
    sent = [connection.send(head)]
    if body := await request.aread():
        sent.append(connection.send(h11.Data(data=body)))
    sent.append(connection.send(h11.EndOfMessage()))
    writer.write(b"".join(part for part in sent if part))
    await writer.drain()
    status, headers, content = 0, httpx.Headers(), bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            status, headers = event.status_code, httpx.Headers(event.headers.raw_items())
        elif isinstance(event, h11.Data):
            content += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(bytes(content)))
