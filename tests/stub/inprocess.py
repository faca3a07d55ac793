"""Stub servers without sockets: a transport that hands requests to them by host name.

Answers come back whole, so streams cannot be watched growing; `running.py` is for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from skyctl.http.target import ServerTarget
from skyctl.http.transport import Answer, CannotConnect, Request
from tests.stub.app import StubServer
from tests.stub.through_httpx import ThroughHttpx


class StubTransport:
    """Routes `http://stub-2/…` to the third of `stubs`; any other host refuses connections."""

    def __init__(self, stubs: Sequence[StubServer]) -> None:
        self._apps = {
            f"stub-{index}": ThroughHttpx(httpx.ASGITransport(stub.asgi))
            for index, stub in enumerate(stubs)
        }

    @property
    def targets(self) -> list[ServerTarget]:
        return [ServerTarget(name, f"http://{name}") for name in self._apps]

    async def send(self, request: Request, *, timeout_s: float) -> Answer:
        app = self._apps.get(request.url.removeprefix("http://"))
        if app is None:
            raise CannotConnect("Connection refused")
        return await app.send(request, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Nothing is open."""
