"""The gate of every vLLM server: requests that arrive while it is paused wait here.

vLLM queues them in its engine without a bound, or refuses them with 503 (0.33, unless it is told to
queue), which routers count as a failing server. Here they wait in every pause mode, until the
server runs again or for `SKYCTL_HOLD_S` seconds. An ASGI middleware behind the guard; standard
library only, as the guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from enum import Enum
from typing import Any
from urllib.parse import parse_qs

# relative: an interpreter without skyctl has this package by another name (`alone/`)
from .guard import GENERATES, Application, Receive, Scope, Send, answer, route_path

Message = MutableMapping[str, Any]

HOLD_VARIABLE = "SKYCTL_HOLD_S"
"""For how many seconds a request waits at most."""
HOLD_S = 1800.0
MOST_WAITING = 4096
_ASK_INTERVAL_S = 1.0


class Verdict(Enum):
    """Why a request that waited is not passed on."""

    GONE = "its client has hung up"
    LATE = "this server has been paused for too long"
    CROWDED = "too many requests wait for this server"


class Gate:
    """See above. Belongs to one event loop."""

    def __init__(self, app: Application, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._app = app
        self._hold_s = float(environ.get(HOLD_VARIABLE) or HOLD_S)
        self._open = asyncio.Event()
        self._open.set()
        self._waiting, self._asked_at = 0, -_ASK_INTERVAL_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = posted(scope)
        if path in ("/pause", "/sleep"):
            await self._pause(path, scope, receive, send)
        elif path in ("/resume", "/wake_up"):
            watched = Watched(send)
            await self._app(scope, receive, watched)
            if watched.ok and (path == "/resume" or not scope.get("query_string")):
                self._open.set()  # a full wake resumes the engine as well
        elif path in GENERATES and not self._open.is_set():
            upload = Upload(receive)
            try:
                verdict = await self._wait(scope, upload)
                if verdict is None:
                    await self._app(scope, upload, send)
                elif verdict is not Verdict.GONE:
                    refusal = error(503, "ServiceUnavailable", f"{verdict.value}; ask again")
                    await answer(send, 503, refusal, (b"retry-after", b"1"))
            finally:
                upload.close()
        else:
            await self._app(scope, receive, send)

    async def _pause(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        was_open = self._open.is_set()
        self._open.clear()  # before the engine: what arrives meanwhile waits here
        pause = _engine_pause(scope) if path == "/pause" else None
        if pause is not None:
            await pause(mode="keep", clear_cache=False)
            await answer(send, 200, {"status": "paused"})
            return
        watched = Watched(send)
        await self._app(scope, receive, watched)
        if was_open and watched.status is not None and not watched.ok:
            self._open.set()

    async def _wait(self, scope: Scope, upload: Upload) -> Verdict | None:
        """Return once the server runs: None, or why the request is given up."""
        if self._open.is_set():
            return None
        if self._waiting >= MOST_WAITING:
            return Verdict.CROWDED
        self._waiting += 1
        until = time.monotonic() + self._hold_s
        try:
            while not self._open.is_set():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return Verdict.LATE
                if not await upload.until(self._open, timeout_s=min(left_s, _ASK_INTERVAL_S)):
                    return Verdict.GONE
                await self._ask(scope)
        finally:
            self._waiting -= 1
        return None

    async def _ask(self, scope: Scope) -> None:
        """Ask the engine, at most once in a while: another process may have thawed it."""
        if self._open.is_set() or time.monotonic() - self._asked_at < _ASK_INTERVAL_S:
            return
        self._asked_at = time.monotonic()
        parts: list[bytes] = []
        path = f"{scope.get('root_path', '')}/is_paused"
        question = {**scope, "method": "GET", "path": path, "raw_path": path.encode()}
        question |= {"query_string": b"", "headers": []}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def collect(message: Mapping[str, Any]) -> None:
            parts.append(message.get("body", b""))

        with contextlib.suppress(Exception):  # it does not say: the request goes on waiting
            await self._app(question, receive, collect)
            if json_object(b"".join(parts)).get("is_paused") is False:
                self._open.set()


class Upload:
    """A request's messages: read ahead while it waits, and handed on afterwards."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: list[Message] = []
        self._reading: asyncio.Future[Message] | None = None

    async def __call__(self) -> Message:
        if self._ahead:
            return self._ahead.pop(0)
        reading, self._reading = self._reading, None
        return await (self._receive() if reading is None else reading)

    async def whole(self) -> bytes:
        """The whole body, which is handed on as well."""
        messages = [await self()]
        while messages[-1].get("more_body"):
            messages.append(await self())
        self._ahead = messages
        return b"".join(message.get("body", b"") for message in messages)

    async def until(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Wait for an event, or that long; False once the client has hung up."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
        deadline = time.monotonic() + timeout_s
        try:
            while not waiting.done() and (left_s := deadline - time.monotonic()) > 0:
                reading = self._reading = self._reading or asyncio.ensure_future(self._receive())
                both: set[asyncio.Future[Any]] = {waiting, reading}
                await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    message = reading.result()
                    if message["type"] == "http.disconnect":
                        return False
                    self._ahead.append(message)
                    self._reading = None
        finally:
            waiting.cancel()
        return True

    def close(self) -> None:
        """Read no further."""
        if self._reading is not None:
            self._reading.cancel()


class Watched:
    """Passes an answer on, and keeps its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    @property
    def ok(self) -> bool:
        return self.status is not None and self.status < 400

    async def __call__(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def posted(scope: Scope) -> str:
    """The route of a POST, without a trailing slash; "" for anything else."""
    if (scope["type"], scope.get("method")) != ("http", "POST"):
        return ""
    return route_path(scope).rstrip("/")


def _engine_pause(scope: Scope) -> Callable[..., Awaitable[None]] | None:
    """The function that freezes the engine, if that is all a request asks for; else None, and
    vLLM's route pauses it.

    vLLM's route (`AsyncLLM.pause_generation`, 0.32) sleeps another 20 ms before it answers, so that
    a caller sees the last outputs first. That is a third of the time for which a push freezes
    servers. From 0.33 on it also has the engine refuse the requests that it gets while a pause by
    abort or wait lasts: those that passed the gate before it. Here it queues them, as in a sleep.
    """
    state = getattr(scope.get("app"), "state", None)
    core: Any = getattr(getattr(state, "engine_client", None), "engine_core", None)
    freeze: Callable[..., Awaitable[None]] | None = getattr(core, "pause_scheduler_async", None)
    if freeze is not None and hasattr(core, "pause_generation_async"):
        core.pause_generation_async = freeze
    query = parse_qs(bytes(scope.get("query_string", b"")).decode("ascii", "replace"))
    if (query.get("mode"), query.get("clear_cache")) != (["keep"], ["false"]):
        return None
    return freeze


def json_object(body: bytes) -> dict[str, Any]:
    """The object of a JSON body; empty for anything else."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    """The body of a refusal, as vLLM's."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
