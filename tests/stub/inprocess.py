"""Stub servers without sockets: a transport that hands requests to them by host name.

Answers come back whole, so streams cannot be watched growing; `running.py` is for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httpx

from skyctl.http.target import ServerTarget
from skyctl.http.transport import Answer, CannotConnect, ConnectionBroke, NoAnswer, Request
from tests.stub.app import StubServer


class StubTransport:
    """Routes `http://stub-2/…` to the third of `stubs`; any other host refuses connections."""

    def __init__(self, stubs: Sequence[StubServer]) -> None:
        self._apps = {f"stub-{index}": stub.asgi for index, stub in enumerate(stubs)}

    @property
    def targets(self) -> list[ServerTarget]:
        return [ServerTarget(name, f"http://{name}") for name in self._apps]

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        host = request.url.removeprefix("http://")
        if host not in self._apps:
            raise CannotConnect("Connection refused")
        try:
            async with asyncio.timeout(timeout_s):
                return await _ask(self._apps[host], host, request)
        except TimeoutError as error:
            raise NoAnswer("no answer in time") from error
        except httpx.TransportError as error:
            raise ConnectionBroke(str(error)) from error

    async def aclose(self) -> None:
        """Nothing is open."""


async def _ask(app: Callable[..., Awaitable[None]], host: str, request: Request) -> Answer:
    """The whole answer of an ASGI app, without the requests and responses of httpx."""
    path, _, query = request.path.partition("?")
    body = request.body or b""
    headers = {"host": host, "content-length": str(len(body)), **request.headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "server": (host, None),
        "client": ("127.0.0.1", 123),
        "root_path": "",
    }
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    answered = asyncio.Event()
    start: MutableMapping[str, Any] = {}
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                answered.set()

    await app(scope, receive, send)
    assert start and answered.is_set()
    told = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in start["headers"]}
    return Answer(start["status"], HTTPStatus(start["status"]).phrase, told, b"".join(parts))
