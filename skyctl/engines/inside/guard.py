"""The guard of every server: it requires a token on every route except health.

An ASGI middleware: vLLM loads it with `--middleware`, other engines name their `Routes`. Standard
library only: it runs in whatever interpreter has the engine (`alone/` is for those without skyctl).
Its secrets come in the environment.

    routes                                          without   API key   control token
    /health, /ping                                  open      open      open
    inference, tokens, metrics, when a key is set   401       yes       yes
    the same, when no key is set                    open      open      open
    everything else: whatever vLLM has or will get  401       401       yes

Refused requests are kept out of the access log, where their URLs would fill the disk: at most once
a minute a line says how many there were.

A server that restarts in a fleet that has moved on to other weights answers inference without the
control token with 503 until it has those weights: it does so while a file exists.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
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
"""A file that is touched whenever the control token is shown: somebody watches this server."""
SHORTEST_TOKEN = 32
"""In characters. A placeholder or an empty variable is no token."""

_OPEN = frozenset({"/health", "/ping"})
_LOOKING_ON = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that request no inference. SGLang's `/generate` takes PUT as well as POST."""


class Routes(NamedTuple):
    """What the API key opens of an engine: inference and read-only routes, by path or prefix,
    except those in `control`. `key_variable` holds that key.
    """

    key_variable: str
    data: frozenset[str]
    data_prefixes: tuple[str, ...]
    control: frozenset[str] = frozenset()


VLLM = Routes(
    "VLLM_API_KEY",
    data=frozenset(
        {
            "/classify",
            "/detokenize",
            "/generative_scoring",
            "/invocations",
            "/load",
            "/metrics",
            "/pooling",
            "/rerank",
            "/score",
            "/tokenize",
            "/tokenizer_info",
            "/version",
        }
    ),
    data_prefixes=("/v1/", "/v2/", "/inference/v1/", "/cohere/v2/"),
    # under an inference prefix, but they load what a caller names, or end others' requests
    control=frozenset(
        {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/inference/v1/abort_requests"}
    ),
)
_ASK = {
    "control": "this route wants the fleet's control token: send the header `Authorization: "
    "Bearer TOKEN`. Who started the fleet finds it with `skyctl urls`; a fleet file with "
    "`servers:` names its variable in `control_token_env`",
    "data": "this route wants the fleet's API key: send the header `Authorization: Bearer KEY`. "
    "Who started the fleet finds it with `skyctl urls`",
    "held": "this server has just started and does not have its fleet's weights yet; ask again",
}


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
                f"{one[:_LONGEST_LOGGED_PATH]}…"
                if isinstance(one, str) and len(one) > _LONGEST_LOGGED_PATH
                else one
                for one in record.args
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
        held = environ.get(HELD_VARIABLE)
        self._held_while = Path(held) if held else None
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
        elif (pause := _engine_pause(scope)) is not None:
            await pause(mode="keep", clear_cache=False)
            await answer(send, 200, {"status": "paused"})
        else:
            await self._app(scope, receive, send)

    def _count(self) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._reported_at > _REPORT_INTERVAL_S:
            _LOG.warning("requests without the right token that were refused: %d", self._refused)
            self._refused, self._reported_at = 0, now

    def _refusal(self, scope: Scope) -> str:
        """ "" for a request that may pass, else what it lacks: "control" or "data"; "held"."""
        path = route_path(scope)
        if path in _OPEN and scope["type"] == "http":
            return ""
        wanted = "data" if is_data(path, self._routes) else "control"
        given = _bearer(scope)
        # both are always compared, so that timing reveals nothing
        has_token = hmac.compare_digest(given, self._token)
        has_key = hmac.compare_digest(given, self._key)
        if has_token:
            self._renew()
            if self._key:
                _hand_over(scope, self._key)
            return ""
        if wanted == "control" or (self._key and not has_key):
            return wanted
        asks_nothing = scope["type"] == "http" and scope["method"] in _LOOKING_ON
        held = self._held_while is not None and not asks_nothing and self._held_while.exists()
        return "held" if held else ""

    def _renew(self) -> None:
        now = time.monotonic()
        if self._lease and now - self._renewed_at > _RENEW_INTERVAL_S:
            self._renewed_at = now
            with contextlib.suppress(OSError):  # removed: it is being ended
                os.utime(self._lease)


def _engine_pause(scope: Scope) -> Callable[..., Awaitable[None]] | None:
    """The function that freezes the engine, if that is all a request asks for; else None.

    vLLM's route (`AsyncLLM.pause_generation`, 0.32) sleeps another 20 ms before it answers, so that
    a caller sees the last outputs first. That is a third of the time for which a push freezes
    servers.
    """
    if (scope["type"], scope.get("method"), route_path(scope)) != ("http", "POST", "/pause"):
        return None
    query = parse_qs(bytes(scope.get("query_string", b"")).decode("ascii", "replace"))
    if (query.get("mode"), query.get("clear_cache")) != (["keep"], ["false"]):
        return None
    state = getattr(scope.get("app"), "state", None)
    core = getattr(getattr(state, "engine_client", None), "engine_core", None)
    found: Callable[..., Awaitable[None]] | None = getattr(core, "pause_scheduler_async", None)
    return found


def route_path(scope: Scope) -> str:
    """The path that routes are matched with: below `--root-path`, if there is one."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def is_data(path: str, routes: Routes = VLLM) -> bool:
    """Whether this is an inference or read-only route, which the API key opens."""
    plain = path.rstrip("/")
    if plain in routes.control or "/.." in path or "//" in path:
        return False
    return plain in routes.data or path.startswith(routes.data_prefixes)


def _bearer(scope: Scope) -> bytes:
    """The token of the first `Authorization` header; b"" without one, or with another scheme."""
    for name, value in scope.get("headers", ()):
        if bytes(name).lower() == b"authorization":
            scheme, _, given = bytes(value).partition(b" ")
            return given.strip() if scheme.lower() == b"bearer" else b""
    return b""


def _hand_over(scope: Scope, key: bytes) -> None:
    """Replace the control token by the API key: vLLM requires it once more below /v1."""
    others = [pair for pair in scope["headers"] if bytes(pair[0]).lower() != b"authorization"]
    scope["headers"] = [*others, (b"authorization", b"Bearer " + key)]


async def _refuse(scope: Scope, send: Send, wanted: str) -> None:
    if scope["type"] == "websocket":
        code, reason = (1013, "try again later") if wanted == "held" else (1008, "no token")
        await send({"type": "websocket.close", "code": code, "reason": reason})
        return
    status, kind = (503, "ServiceUnavailable") if wanted == "held" else (401, "Unauthorized")
    error = {"message": _ASK[wanted], "type": kind, "param": None, "code": status}
    more = (b"retry-after", b"1") if wanted == "held" else (b"www-authenticate", b"Bearer")
    await answer(send, status, {"error": error}, more)


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
