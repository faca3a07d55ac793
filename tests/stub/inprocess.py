"""Stub servers without sockets: an httpx transport that hands requests to them by host name.

Answers come back whole, so streams cannot be watched growing; `running.py` is for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from skyctl.control.target import ServerTarget
from tests.stub.app import StubServer


class StubTransport(httpx.AsyncBaseTransport):
    """Routes `http://stub-2/…` to the third of `stubs`; any other host refuses connections."""

    def __init__(self, stubs: Sequence[StubServer]) -> None:
        self._apps = {
            f"stub-{index}": httpx.ASGITransport(stub.asgi) for index, stub in enumerate(stubs)
        }

    @property
    def targets(self) -> list[ServerTarget]:
        return [ServerTarget(name, f"http://{name}") for name in self._apps]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        app = self._apps.get(request.url.host)
        if app is None:
            raise httpx.ConnectError("Connection refused")
        return await app.handle_async_request(request)
