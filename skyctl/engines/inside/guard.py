"""The guard of every server: it requires a token on every route except health.

An ASGI middleware: vLLM loads it with `--middleware`, other engines name their `Routes`. Standard
library only: it runs in whatever interpreter has the engine (`alone/` is for those without skyctl).
Its secrets come in the environment.

    routes                                          without   API key   control token
    /health, /ping                                  open      open      open
    inference, tokens, metrics, when a key is set   401       yes       yes
    the same, when no key is set                    open      open      open
    everything else: whatever vLLM has or will get  401       401       yes
    a path with characters that cannot be printed   401       401       400

The API key opens what is listed, by its whole path. Starlette's routes also match a path that ends
with a newline: such a path passes for no client, since what is behind the guard compares paths too.

Refused requests are kept out of the access log, where their URLs would fill the disk: at most once
a minute a line says how many there were.

A server that restarts in a fleet that has moved on to other weights answers inference without the
control token with 503 until it has those weights: it does so while a file exists (`_Closure`).

A freeze belongs to the fleet that made it: until that fleet thaws the engine, others have inference
and what only reports, and are answered 409 on all other routes (`_Freeze`), whatever their token.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = "SKYCTL_CONTROL_TOKEN"
HELD_VARIABLE = "SKYCTL_HELD_WHILE"
"""A path: while the file exists, only the control token opens inference."""
LEASE_VARIABLE = "SKYCTL_LEASE"
"""A file that is touched whenever the control token is shown: a supervisor watches this server."""
HOLDER_HEADER = "skyctl-holder"
"""Names the fleet that a control request acts for: an id without blanks, then words for people."""
FREEZE_HEADER = "skyctl-freeze"
"""What a request does to the freeze besides: `take-over` from another fleet; `release`: whoever
likes may thaw the engine from now on."""
FROZEN_BY_ANOTHER = "froze this server"
"""What the answer to a fleet says that did not make the freeze."""
SHORTEST_TOKEN = 32
"""In characters. A placeholder or an empty variable is not a token."""

_OPEN = frozenset({"/health", "/ping"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that request no inference. SGLang's `/generate` takes PUT as well as POST."""


class Routes(NamedTuple):
    """What the API key opens of an engine: inference and read-only routes."""

    key_variable: str
    """The variable that holds the key."""
    data: frozenset[str]
    """Whole paths, in which `{}` stands for a segment. All other paths are control."""
    pauses: frozenset[str] = frozenset()
    """Control routes that freeze the engine."""
    thaws: frozenset[str] = frozenset()
    """Control routes that let it generate again; with `tags` they wake a part, and do not."""
    reports: frozenset[str] = frozenset()
    """Control routes that change nothing."""


GENERATES = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/decisions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""Routes of vLLM whose answers depend on the weights."""

VLLM = Routes(
    "VLLM_API_KEY",
    # all that 0.26 and 0.33 have for any task, except what loads a path that a caller names
    # (`/v1/load_lora_adapter`) or ends others' requests (`/inference/v1/abort_requests`)
    data=GENERATES
    | {
        "/cohere/v2/chat/render",
        "/detokenize",
        "/load",
        "/metrics",
        "/tokenize",
        "/tokenizer_info",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/models",
        "/v1/realtime",
        "/v1/responses/render",
        "/v1/responses/{}",
        "/v1/responses/{}/cancel",
        "/version",
    },
    pauses=frozenset({"/pause"}),
    thaws=frozenset({"/resume", "/wake_up"}),
    reports=frozenset(
        {"/get_world_size", "/is_paused", "/is_sleeping", "/server_info", "/weight_info"}
    ),
)
_BEARER, _SOON = (b"www-authenticate", b"Bearer"), (b"retry-after", b"1")


class Refusal(Enum):
    """Why a request is not passed on, and how it is answered."""

    CONTROL = (
        401,
        "Unauthorized",
        "this route wants the fleet's control token: send the header `Authorization: Bearer "
        "TOKEN`. Who started the fleet finds it with `skyctl urls`; a fleet file with `servers:` "
        "names its variable in `control_token_env`",
        _BEARER,
    )
    DATA = (
        401,
        "Unauthorized",
        "this route wants the fleet's API key: send the header `Authorization: Bearer KEY`. "
        "Who started the fleet finds it with `skyctl urls`",
        _BEARER,
    )
    HELD = (
        503,
        "ServiceUnavailable",
        "this server has just started and does not have its fleet's weights yet; ask again",
        _SOON,
    )
    PATH = (400, "BadRequest", "the path has characters that no route has")

    def __init__(self, status: int, kind: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": status}}


_LOG = logging.getLogger("uvicorn.error")
"""uvicorn's logger for what is not about one request: vLLM shows it."""
_REFUSING: ContextVar[bool] = ContextVar("refusing", default=False)
_REPORT_INTERVAL_S = 60.0
_RENEW_INTERVAL_S = 1.0
_LONGEST_LOGGED_PATH = 500


class _AccessLog(logging.Filter):
    """Keeps refused requests out of uvicorn's access log, and truncates overlong lines of others.

    uvicorn writes the line when the response begins: within our own `send`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                f"{argument[:_LONGEST_LOGGED_PATH]}…"
                if isinstance(argument, str) and len(argument) > _LONGEST_LOGGED_PATH
                else argument
                for argument in record.args
            )
        return not _REFUSING.get()


_ACCESS_LOG = _AccessLog()


class Guard:
    """Passes on requests with the right token. Raises ValueError if it has no token.

    It refuses what it does not know: unknown routes require the control token, and a connection
    that is neither HTTP nor a websocket is not served.
    """

    def __init__(
        self, app: Application, *, environ: Mapping[str, str] | None = None, routes: Routes = VLLM
    ) -> None:
        environ = os.environ if environ is None else environ
        token, key = environ.get(TOKEN_VARIABLE, ""), environ.get(routes.key_variable, "")
        if len(token) < SHORTEST_TOKEN:
            raise ValueError(f"{TOKEN_VARIABLE} holds no control token: this server stays shut")
        self._app = app
        self._routes = routes
        self._token = token.encode()
        self._key = key.encode()
        file = environ.get(HELD_VARIABLE)
        self._closure = _Closure(Path(file)) if file else None
        self._freeze = _Freeze(routes)
        self._lease, self._renewed_at = environ.get(LEASE_VARIABLE), -_RENEW_INTERVAL_S
        self._refused, self._reported_at = 0, -_REPORT_INTERVAL_S
        logging.getLogger("uvicorn.access").addFilter(_ACCESS_LOG)  # once, however often this runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] not in ("http", "websocket"):
            return
        elif refusal := self._refusal(scope):
            self._count()
            refusing = _REFUSING.set(True)
            try:
                await _refuse(scope, send, refusal)
            finally:
                _REFUSING.reset(refusing)
        else:
            await self._freeze.passing(self._app, scope, receive, send)

    def _count(self) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._reported_at > _REPORT_INTERVAL_S:
            _LOG.warning("requests without the right token that were refused: %d", self._refused)
            self._refused, self._reported_at = 0, now

    def _refusal(self, scope: Scope) -> Refusal | None:
        """None for a request that may pass."""
        path = route_path(scope)
        if path in _OPEN and scope["type"] == "http":
            return None
        given = _bearer(scope)
        # both are always compared, so that timing reveals nothing
        has_token = hmac.compare_digest(given, self._token)
        has_key = hmac.compare_digest(given, self._key)
        closed = self._closure is not None and self._closure.now()
        if has_token:
            self._renew()
            if self._key:
                _hand_over(scope, self._key)
            return None if path.isprintable() else Refusal.PATH
        if not is_data(path, self._routes):
            return Refusal.CONTROL
        if self._key and not has_key:
            return Refusal.DATA
        reads = scope["type"] == "http" and scope["method"] in _READING
        return Refusal.HELD if closed and not reads else None

    def _renew(self) -> None:
        now = time.monotonic()
        if self._lease and now - self._renewed_at > _RENEW_INTERVAL_S:
            self._renewed_at = now
            with contextlib.suppress(OSError):  # removed: it is being ended
                os.utime(self._lease)


class _Closure:
    """Whether a server is closed to users: while a file exists.

    A directory that was removed, or replaced by another, says nothing about the file: the server
    stays as it was. So does a file that cannot be looked up.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._closed = True
        try:
            # kept open: its inode number is not given to the next directory of this name
            self._directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            self._directory = -1

    def now(self) -> bool:
        """Look. Control requests look as well, so that a change is seen when it is made."""
        with contextlib.suppress(OSError):
            try:
                os.stat(self._file)  # noqa: PTH116 - `exists` takes an error for absence
                self._closed = True
            except FileNotFoundError:
                directory = os.stat(self._file.parent)  # noqa: PTH116 - as above
                if os.path.samestat(directory, os.fstat(self._directory)):
                    self._closed = False
        return self._closed


class _Freeze:
    """Who froze the engine: until that fleet is done, no other thaws it, freezes it as well, or
    touches its weights.

    Requests that name no fleet freeze for nobody in particular. Each process of a server with
    several (`--api-server-count`) knows of the requests that it answered itself.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._switches = routes.pauses | routes.thaws
        self._arrived = 0  # requests that were passed on
        self._pausing: dict[int, str] = {}  # pauses under way by their number, with their fleets
        self._settled = 0, ""  # number of the last switch that succeeded, and the holder since then

    async def passing(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a request on, unless it would touch what another fleet froze."""
        path, routes = route_path(scope), self._routes
        if path not in self._switches and not (self._holder and self._acts(path)):
            await application(scope, receive, send)
            return
        requester, order = _header(scope, HOLDER_HEADER), _header(scope, FREEZE_HEADER)
        if order != "take-over" and self._is_other(requester):
            await _refuse_frozen(scope, send, self._holder.partition(" ")[2] or "another fleet")
            return
        self._arrived += 1
        number, status = self._arrived, 0
        if path in routes.pauses:  # before the engine acts: it may act and not answer
            self._pausing[number] = requester or self._holder

        async def sending(message: Mapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await application(scope, receive, sending)
        finally:
            holder = self._pausing.pop(number, "")
            thaws = path in routes.thaws and status and not _query(scope).get("tags")
            switched = (path in routes.pauses or thaws) and status < 400
            if switched and number > self._settled[0]:
                self._settled = number, "" if order == "release" else holder

    @property
    def _holder(self) -> str:
        """The fleet of the last pause, if it has not failed: the engine takes switches in the order
        in which they arrive, whenever it answers them.
        """
        since, holder = self._settled
        return next((self._pausing[n] for n in reversed(self._pausing) if n > since), holder)

    def _acts(self, path: str) -> bool:
        """Whether a request to this path may change the engine."""
        return path not in _OPEN | self._routes.reports and not is_data(path, self._routes)

    def _is_other(self, requester: str) -> bool:
        return bool(self._holder) and requester.partition(" ")[0] != self._holder.partition(" ")[0]


def _query(scope: Scope) -> Mapping[str, Sequence[str]]:
    return parse_qs(bytes(scope.get("query_string", b"")).decode("ascii", "replace"))


def _header(scope: Scope, name: str) -> str:
    """The first header of this name, in lower case; "" without one."""
    for key, value in scope.get("headers", ()):
        if bytes(key).lower() == name.encode():
            return bytes(value).strip().decode("latin-1")
    return ""


def route_path(scope: Scope) -> str:
    """The path that routes are matched with: below `--root-path`, if there is one."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_data(path: str, routes: Routes = VLLM) -> bool:
    """Whether this is an inference or read-only route, which the API key opens."""
    return _pattern(routes.data).fullmatch(path) is not None


@lru_cache
def _pattern(paths: frozenset[str]) -> re.Pattern[str]:
    """Matches these paths, also with a trailing slash: a redirect to the path, or a mount."""
    segment = r"[\w.:~@+-]*\w"  # not `..`, which a proxy would resolve
    alternatives = "|".join(re.escape(path).replace(r"\{\}", segment) for path in sorted(paths))
    return re.compile(f"({alternatives})/?", re.ASCII)


def _bearer(scope: Scope) -> bytes:
    """The token of the first `Authorization` header; b"" without one, or with another scheme."""
    scheme, _, given = _header(scope, "authorization").partition(" ")
    return given.encode("latin-1").strip() if scheme.lower() == "bearer" else b""


def _hand_over(scope: Scope, key: bytes) -> None:
    """Replace the control token by the API key: vLLM requires it once more below /v1."""
    others = [pair for pair in scope["headers"] if bytes(pair[0]).lower() != b"authorization"]
    scope["headers"] = [*others, (b"authorization", b"Bearer " + key)]


async def _refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        code, reason = (1013, "try again later") if refusal is Refusal.HELD else (1008, "no token")
        await send({"type": "websocket.close", "code": code, "reason": reason})
    else:
        await answer(send, refusal.status, refusal.body, *refusal.headers)


async def _refuse_frozen(scope: Scope, send: Send, holder: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": FROZEN_BY_ANOTHER})
        return
    message = (
        f"{holder} {FROZEN_BY_ANOTHER}: until that fleet thaws it, with `skyctl resume`, others "
        "change nothing here. Where that fleet is gone, take the freeze over: `skyctl resume "
        "--force`. A trainer in `Fleet.update` sends `update.headers`"
    )
    error = {"message": message, "type": "FrozenByAnother", "param": None, "code": 409}
    await answer(send, 409, {"error": error})


async def answer(
    send: Send, status: int, content: Mapping[str, Any], *more: tuple[bytes, bytes]
) -> None:
    """Send JSON, with `more` headers."""
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
