"""Which weights answer which request: what a request may demand, and what its answer says.

    its demand     x-weight-version-exact: LABEL   or   x-weight-version-min: LABEL
                   not met, or no longer met before its last token: 409, to be sent again
    its answer     x-weight-version-begin, and -end where the answer comes in one piece
    with x-weight-version-fields: true             both in the JSON; in a stream, a comment
                   `: weight-version LABEL` before the first token of another version, and before
                   `data: [DONE]` one with the number of tokens of each

skyctl labels a server while it is paused, after its weights are verified and before it is resumed:
no token is made between two labels, so the label that was named last is that of the next token.
An ASGI middleware behind the gate (`gate.py`); standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# relative: an interpreter without skyctl has this package by another name (`alone/`)
from .gate import Message, Upload, Watched, error, json_object, posted
from .guard import GENERATES, Application, Receive, Scope, Send, answer

BASE = "base"
"""The label of what a server was started with; vLLM's own is `default`."""
BEGIN, END = b"x-weight-version-begin", b"x-weight-version-end"
EXACT, MIN, FIELDS = b"x-weight-version-exact", b"x-weight-version-min", b"x-weight-version-fields"
EARLIER = "earlier"
"""Key of a label's request: the labels of the fleet before it, oldest first."""
_LONGEST_LABEL = 400
_LABELS = {"/update_weight_version": "new_version", "/finish_weight_update": "weight_version"}


class Versions:
    """The labels that a server has had, oldest first."""

    def __init__(self) -> None:
        self.current = BASE
        self._order = [BASE]

    def name(self, label: str, earlier: Sequence[str] = ()) -> None:
        """The weights are `label` from now on, and came after `earlier`."""
        self._order = list(dict.fromkeys([BASE, *(earlier or self._order), label]))
        self.current = label

    def meets(self, demand: Demand) -> bool:
        """Whether the weights are those that a request demands."""
        if demand.exact and not _means(demand.exact, self.current):
            return False
        places = [place for place, label in enumerate(self._order) if _means(demand.least, label)]
        return not demand.least or bool(places and places[0] <= self._order.index(self.current))


def _means(word: str, label: str) -> bool:
    """Whether `word` is the label, or its name without a digest."""
    return word in (label, label.rpartition("@")[0]) or (label == BASE and word == "default")


@dataclass(frozen=True)
class Demand:
    """The versions that may answer a request; any if both are ""."""

    exact: str = ""
    least: str = ""

    def __bool__(self) -> bool:
        return bool(self.exact or self.least)


class Versioned:
    """See above. Belongs to one event loop."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._versions = Versions()
        self._under_way: set[_Answer] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = posted(scope)
        if path in _LABELS:
            await self._label(path, scope, receive, send)
        elif path in GENERATES:
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _label(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        upload = Upload(receive)
        body = await upload.whole()
        watched = Watched(send)
        try:
            await self._app(scope, upload, watched)
        finally:
            upload.close()
        # 404: a version without labels of its own
        if watched.ok or watched.status == 404:
            sent = json_object(body)
            label, earlier = sent.get(_LABELS[path]), sent.get(EARLIER)
            if isinstance(label, str) and label:
                self._versions.name(label, earlier if isinstance(earlier, list) else ())
                for under_way in list(self._under_way):
                    under_way.check()

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        demand = demand_of(scope)
        if demand is None:
            refusal = error(400, "BadRequest", "a demanded version is not a label")
            await answer(send, 400, refusal)
            return
        under_way = _Answer(self._versions, demand, send, _wants_fields(scope))
        self._under_way.add(under_way)
        try:
            await under_way.carry_out(self._app(scope, receive, under_way.send))
        finally:
            self._under_way.discard(under_way)


class _Overtaken(Exception):
    """The weights are no longer those that the request demands."""


class _Outbox:
    """Sends messages in their order without making the engine wait for a client that reads slowly:
    its tokens would be counted when they are sent, and not when they are made. What a client does
    not read stays in this process's memory.
    """

    def __init__(self, send: Send) -> None:
        self._client = send
        self._messages: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self._send_all())
        # a client that is gone is no news once nobody waits for it
        self._sending.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def send(self, message: Mapping[str, Any]) -> None:
        """In place of the client's `send`. The last message is sent when this returns."""
        self._messages.put_nowait(message)
        if self._sending.done() or not message.get("more_body"):
            await self._sending

    def close(self) -> None:
        """Send nothing more."""
        self._sending.cancel()

    async def _send_all(self) -> None:
        more = True
        while more:
            message = await self._messages.get()
            await self._client(message)
            more = bool(message.get("more_body"))


class _Answer:
    """The answer to one request, on its way to the client."""

    def __init__(self, versions: Versions, demand: Demand, send: Send, fields: bool) -> None:
        self._versions, self._demand, self._client = versions, demand, send
        self._fields = fields
        self._begin = versions.current
        self._spans: list[tuple[str, int]] = []
        self._start: Message | None = None  # while the whole body is awaited
        self._parts: list[bytes] = []
        self._started = self._streams = self._overtaken = False
        self._work: asyncio.Future[None] | None = None
        self._outbox: _Outbox | None = None

    async def carry_out(self, work: Awaitable[None]) -> None:
        """Let the server answer; 409 if it cannot, or can no longer, as demanded."""
        try:
            await self._carry_out(work)
        finally:
            if self._outbox is not None:
                self._outbox.close()

    async def _carry_out(self, work: Awaitable[None]) -> None:
        if not self._demand:
            await work
            return
        self._work = asyncio.ensure_future(work)
        self.check()
        try:
            await asyncio.shield(self._work)
        except BaseException:
            if not self._overtaken:
                self._work.cancel()
                raise
        if self._overtaken:
            await self._refuse()

    def check(self) -> None:
        """The weights may be others now."""
        if self._work is not None and not self._versions.meets(self._demand):
            self._overtaken = True
            self._work.cancel()

    async def send(self, message: Mapping[str, Any]) -> None:
        """In place of the client's `send`."""
        if self._demand and not self._versions.meets(self._demand):
            self._overtaken = True
            raise _Overtaken
        if message["type"] == "http.response.start":
            await self._head({**message})
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._gather(message)
        elif message["type"] == "http.response.body" and self._streams and self._fields:
            await self._client({**message, "body": self._counted(message.get("body", b""))})
        else:
            await self._client(message)

    async def _head(self, message: Message) -> None:
        kind = next((v for k, v in message["headers"] if bytes(k).lower() == b"content-type"), b"")
        self._streams = bytes(kind).startswith(b"text/event-stream")
        added = [(BEGIN, _latin(self._begin))]
        if not self._streams:  # the last token is made by now
            added.append((END, _latin(self._versions.current)))
        message["headers"] = [*message["headers"], *added]
        if self._fields and bytes(kind).startswith(b"application/json"):
            self._start = message
            return
        self._started = True
        await self._client(message)
        if self._streams and self._fields:
            self._outbox = _Outbox(self._client)
            self._client = self._outbox.send

    async def _gather(self, message: Mapping[str, Any]) -> None:
        """Collect a JSON answer; its fields go to its end."""
        assert self._start is not None
        self._parts.append(message.get("body", b""))
        if message.get("more_body"):
            return
        body = b"".join(self._parts)
        with contextlib.suppress(ValueError):
            parsed = json.loads(body)
            if isinstance(parsed, dict):
                versions = {"begin": self._begin, "end": self._versions.current}
                body = json.dumps({**parsed, "weight_versions": versions}).encode()
        start, self._start = self._start, None
        others = [(k, v) for k, v in start["headers"] if bytes(k).lower() != b"content-length"]
        start["headers"] = [*others, (b"content-length", str(len(body)).encode())]
        self._started = True
        await self._client(start)
        await self._client({"type": "http.response.body", "body": body})

    def _counted(self, part: bytes) -> bytes:
        """Count the tokens of a part of a stream; before its end comes what was counted."""
        tokens = sum(_tokens(line) for line in part.split(b"\n"))
        current = self._versions.current
        if tokens and (not self._spans or self._spans[-1][0] != current):
            self._spans.append((current, 0))
            part = b": weight-version " + _latin(current) + b"\n\n" + part
        if self._spans:
            self._spans[-1] = (self._spans[-1][0], self._spans[-1][1] + tokens)
        if b"data: [DONE]" not in part:
            return part
        spans = [{"version": version, "tokens": count} for version, count in self._spans]
        summary = {"begin": self._begin, "end": current, "spans": spans}
        comment = b": weight-versions " + json.dumps(summary).encode() + b"\n\n"
        return part.replace(b"data: [DONE]", comment + b"data: [DONE]", 1)

    async def _refuse(self) -> None:
        current = self._versions.current
        demanded = self._demand.exact or f"{self._demand.least} or later"
        refusal = error(
            409, "Conflict", f"the weights are {current}, demanded {demanded}; ask again"
        )
        refusal["error"]["weight_version"] = current
        if not self._started:
            more = ((b"retry-after", b"1"), (END, _latin(current)))
            await answer(self._client, 409, refusal, *more)
            return
        event = b"data: " + json.dumps(refusal).encode() + b"\n\n" if self._streams else b""
        await self._client({"type": "http.response.body", "body": event, "more_body": False})


def demand_of(scope: Scope) -> Demand | None:
    """What a request demands; None if it is not a label."""
    given: dict[bytes, str] = {}
    for name, value in scope.get("headers", ()):
        if (key := bytes(name).lower()) in (EXACT, MIN):
            try:
                given[key] = bytes(value).decode().strip()
            except UnicodeDecodeError:
                return None
            if not 0 < len(given[key]) <= _LONGEST_LABEL or not given[key].isprintable():
                return None
    return Demand(given.get(EXACT, ""), given.get(MIN, ""))


def _wants_fields(scope: Scope) -> bool:
    pairs = ((bytes(name).lower(), bytes(value)) for name, value in scope.get("headers", ()))
    return any(name == FIELDS and value.strip().lower() == b"true" for name, value in pairs)


def _tokens(line: bytes) -> int:
    """The tokens of one event of a stream: their ids if it has them, or one for a text."""
    if not line.startswith(b"data: {"):
        return 0
    count = 0
    for choice in json_object(line[len(b"data: ") :]).get("choices") or ():
        if isinstance(choice, dict):
            ids = choice.get("token_ids")
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            count += len(ids) if isinstance(ids, list) else bool(text)
    return count


def _latin(label: str) -> bytes:
    """A label as a header's value; other characters are escaped."""
    return label.encode("latin-1", "backslashreplace")
