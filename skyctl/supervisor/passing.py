"""Inference requests at the fleet URL, passed on to the router, for clients that take one URL."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

if TYPE_CHECKING:
    import httpx

    from skyctl.supervisor.resident import Supervisor

_PASSED = (b"content-type", b"accept", b"user-agent")
_PASSED_PREFIX = b"x-"  # the router routes by them, and the guard reads versions there
_BACK = (b"content-type", b"retry-after")
_CONNECT_TIMEOUT_S = 5.0
_LOOK_S = 0.5


class Passing:
    """Sends requests to the router, or without one to the servers that take requests, in turn.
    `key` is the fleet's for inference; None if it needs none.
    """

    def __init__(self, fleet: Supervisor, key: str | None) -> None:
        self._fleet = fleet
        self._key = key
        self._http: httpx.AsyncClient | None = None
        self._turns = itertools.count()

    async def answer(self, request: Request, body: bytes) -> Response:
        """The answer to an inference request, as it arrives."""
        url = self._url()
        if url is None:
            return _unavailable("no server takes requests now")
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(
                trust_env=False,
                timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            )
        headers = [
            (name, value)
            for name, value in request.headers.raw  # bytes: they may be in any encoding
            if name in _PASSED or name.startswith(_PASSED_PREFIX)
        ]
        if self._key:
            headers.append((b"authorization", f"Bearer {self._key}".encode()))
        query = f"?{request.url.query}" if request.url.query else ""
        try:
            sent = self._http.build_request(
                request.method,
                f"{url}{request.scope['path']}{query}",
                headers=headers,
                content=body,
            )
            answer = await _unless_gone(request, self._http.send(sent, stream=True))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            return _unavailable(f"{url} does not answer: {error}")
        kept = {
            name.lower().decode("latin-1"): value.decode("latin-1")
            for name, value in answer.headers.raw
            if name.lower() in _BACK or name.lower().startswith(_PASSED_PREFIX)
        }
        return StreamingResponse(_parts(answer), answer.status_code, kept)

    async def close(self) -> None:
        """Close every connection."""
        if self._http is not None:
            await self._http.aclose()

    def _url(self) -> str | None:
        router = self._fleet.router
        if router is not None:
            return router.spec.url
        servers = list(self._fleet.desired().values())
        return servers[next(self._turns) % len(servers)] if servers else None


async def _unless_gone(
    request: Request, sending: Coroutine[Any, Any, httpx.Response]
) -> httpx.Response:
    """The answer. Raises ClientDisconnect: the client hung up, which ends its request."""
    task = asyncio.create_task(sending)
    try:
        while True:
            await asyncio.wait({task}, timeout=_LOOK_S)
            if task.done():
                return task.result()
            if await request.is_disconnected():
                raise ClientDisconnect
    finally:
        task.cancel()


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


def _unavailable(message: str) -> Response:
    error = {"error": {"message": message, "type": "ServiceUnavailable", "code": 503}}
    return JSONResponse(error, 503, {"retry-after": "1"})
