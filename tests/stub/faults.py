"""Faults the stub plays on order: a pure ASGI layer around the app.

One fault per route (`*` for every route):

    {"/pause": {"kind": "status", "status": 500, "calls": [2]}, "/resume": {"kind": "hang"}}

| kind | what the client sees |
|---|---|
| delay | the answer `seconds` late |
| hang, hang-after | no answer, ever; with -after the call is carried out first |
| status | an error `status` with `text`, nothing carried out |
| reset, reset-after | the connection breaks; with -after the call is carried out first |
| drip | every piece of the answer `seconds` late |
| cut | the connection breaks after `pieces` pieces of the answer |

`calls` lists the calls of that route, from 1, that are hit; all when absent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

KINDS = {"delay", "hang", "hang-after", "status", "reset", "reset-after", "drip", "cut"}


@dataclass(frozen=True)
class Fault:
    """One fault; see the module's table."""

    kind: str
    seconds: float = 0.0
    status: int = 500
    text: str = "injected fault"
    pieces: int = 1
    calls: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join(sorted(KINDS))}")

    def hits(self, call: int) -> bool:
        return not self.calls or call in self.calls

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fault:
        return cls(**{**data, "calls": tuple(data.get("calls", ()))})


class FaultLayer:
    """Plays faults in front of `app`. `calls` counts requests per route, `arrived` signals them."""

    def __init__(self, app: App, faults: Mapping[str, Fault]) -> None:
        self._app = app
        self.faults = dict(faults)
        self.calls: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()  # those of faults, by route and status
        self.changed = asyncio.Condition()

    async def until(self, path: str, calls: int = 1) -> None:
        """Wait until `path` was called `calls` times: what tests wait for instead of sleeping."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.calls[path] >= calls)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path.startswith("/stub/"):  # the tests' own routes
            await self._app(scope, receive, send)
            return
        async with self.changed:
            self.calls[path] += 1
            self.changed.notify_all()
        fault = self.faults.get(path) or self.faults.get("*")
        if fault is None or not fault.hits(self.calls[path]):
            await self._app(scope, receive, send)
        else:
            await self._play(fault, scope, receive, send)

    async def _play(self, fault: Fault, scope: Message, receive: Receive, send: Send) -> None:
        if fault.kind == "status":
            self.answers[scope["path"], fault.status] += 1
            body = {"error": {"message": fault.text, "code": fault.status}}
            await JSONResponse(body, fault.status)(scope, receive, send)
            return
        if fault.kind in ("hang-after", "reset-after"):
            await self._app(scope, receive, _discard)
        if fault.kind.startswith("hang"):
            await _gone(receive)
            return
        if fault.kind.startswith("reset"):
            _break(send)
            return
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        await self._app(scope, receive, _tampered(send, fault))


def _tampered(send: Send, fault: Fault) -> Send:
    """`send` with the answer's body dripped or cut."""
    pieces = 0

    async def tampered(message: Message) -> None:
        nonlocal pieces
        if message["type"] == "http.response.body":
            if fault.kind == "cut" and pieces == fault.pieces:
                _break(send)
            if fault.kind == "drip":
                await asyncio.sleep(fault.seconds)
            pieces += 1
        await send(message)

    return tampered


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _discard(message: Message) -> None:
    del message


def _break(send: Send) -> None:
    """Break the client's connection: abort uvicorn's transport, or raise as httpx would."""
    cycle = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if transport is None:
        import httpx  # which a stub of its own process need not import

        raise httpx.ReadError("connection reset by the stub")
    transport.abort()
    raise ConnectionResetError("reset by the stub")
