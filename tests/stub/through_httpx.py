"""Control calls over a transport of httpx, which has one for functions and one for ASGI apps."""

from __future__ import annotations

import asyncio

import httpx

from skyctl.http.transport import Answer, CannotConnect, ConnectionBroke, NoAnswer, Request


class ThroughHttpx:
    """A `Transport` of skyctl over one of httpx: MockTransport, ASGITransport or a stub's."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        sent = httpx.Request(
            request.method,
            request.url + request.path,
            headers=dict(request.headers),
            content=request.body,
        )
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(sent)
                body = await response.aread()
        except TimeoutError as error:
            raise NoAnswer("no answer in time") from error
        except httpx.ConnectError as error:
            raise CannotConnect(str(error)) from error
        except httpx.TransportError as error:
            raise ConnectionBroke(str(error)) from error
        return Answer(response.status_code, response.reason_phrase, dict(response.headers), body)

    async def aclose(self) -> None:
        await self._transport.aclose()
