"""HTTP calls to servers: one client, a deadline per call, errors mapped to SkyctlError."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Self
from urllib.parse import urlencode

from skyctl.errors import DeadlineExceeded, ServerError, ServerUnreachable
from skyctl.http.connections import KeptConnections
from skyctl.http.target import ServerTarget
from skyctl.http.transport import (
    Answer,
    CannotConnect,
    ConnectionBroke,
    NoAnswer,
    Request,
    Transport,
    TransportError,
)

QueryValue = str | int | float | bool | Sequence[str]

_ENCODER = json_module.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False
)  # dumps() with options makes one for each call
_JSON = {"content-type": "application/json"}
_ERROR_TEXT_LIMIT = 300
WHICH_TAKE_REQUESTS = "which servers take requests, and why the others do not: skyctl status"


class ControlClient:
    """The one HTTP client of a process's control calls. Use as an async context manager.

    Proxies and netrc from the environment are ignored: control calls go straight to the server.
    Redirects are not followed. Every method raises only `errors.py` errors. `transport` replaces
    the network in tests.
    """

    def __init__(self, *, transport: Transport | None = None) -> None:
        self._transport = transport or KeptConnections()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def call(
        self,
        target: ServerTarget,
        method: str,
        path: str,
        *,
        params: Mapping[str, QueryValue] | None = None,
        json: Any = None,
        timeout_s: float = 30.0,
    ) -> Any:
        """Send one request and return its parsed JSON, or None for an empty body.

        `timeout_s` bounds the whole call in seconds. A GET is sent once more when its connection
        breaks before an answer; anything else is sent once.

        Raises:
            ServerUnreachable: no connection, or it broke (a POST may have been carried out).
            DeadlineExceeded: no answer in time; whether the server acted is unknown.
            ServerError: an error status, or a body that is not JSON.
        """
        answer = await self._answer(target, method, path, params, json, timeout_s)
        if not answer.body.strip():
            return None
        try:
            return json_module.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{_where(target, method, path)} answered with something that is not JSON: "
                f"{_shortened(answer.text, target)!r}",
                status=answer.status,
            ) from error

    async def text(
        self,
        target: ServerTarget,
        path: str,
        *,
        method: str = "GET",
        params: Mapping[str, QueryValue] | None = None,
        json: Any = None,
        timeout_s: float = 30.0,
    ) -> str:
        """The body as text, for routes that do not answer in JSON. Raises as `call` does."""
        return (await self._answer(target, method, path, params, json, timeout_s)).text

    async def _answer(
        self,
        target: ServerTarget,
        method: str,
        path: str,
        params: Mapping[str, QueryValue] | None,
        json: Any,
        timeout_s: float,
    ) -> Answer:
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        if target.holder:
            headers["skyctl-holder"] = target.holder
        if target.freeze:
            headers["skyctl-freeze"] = target.freeze.value
        body = None
        if json is not None:
            headers |= _JSON
            body = json_body(json)
        request = Request(method, target.url, path + _query(params), headers, body)
        try:
            answer = await self._send(request, timeout_s)
        except TransportError as error:
            where = _where(target, method, path)
            if isinstance(error, NoAnswer):
                raise DeadlineExceeded(f"{where}: no answer in {timeout_s:g} s") from error
            if isinstance(error, CannotConnect):
                raise ServerUnreachable(f"{where}: cannot connect ({error})") from error
            if isinstance(error, ConnectionBroke):
                raise ServerUnreachable(f"{where}: the connection broke ({error})") from error
            raise ServerError(f"{where}: {error}") from error
        if not answer.is_success:
            raise _status_error(target, _where(target, method, path), answer)
        return answer

    async def _send(self, request: Request, timeout_s: float) -> Answer:
        began = time.monotonic()
        try:
            return await self._transport.send(request, timeout_s=timeout_s)
        except ConnectionBroke:
            if request.method != "GET":
                raise
        left_s = timeout_s - (time.monotonic() - began)
        return await self._transport.send(request, timeout_s=left_s)


def json_body(value: Any) -> bytes:
    """`value` as the JSON of a request. Raises ValueError for what JSON cannot hold."""
    return _ENCODER.encode(value).encode()


def error_text(body: str) -> str:
    """The human part of an error body: vLLM's and FastAPI's JSON shapes, or the text itself."""
    try:
        parsed = json_module.loads(body)
    except (ValueError, RecursionError):
        return body
    if isinstance(parsed, dict):
        detail = parsed.get("error", parsed.get("detail", parsed.get("message")))
        if isinstance(detail, dict):
            detail = detail.get("message", detail)
        if detail:
            return detail if isinstance(detail, str) else json_module.dumps(detail)
    return body


def _status_error(target: ServerTarget, where: str, answer: Answer) -> ServerError:
    status = answer.status
    text = _shortened(error_text(answer.text), target) or answer.reason
    if text.startswith("<"):  # an HTML page
        text = answer.reason
    hint = ""
    if status in (401, 403):
        hint = "name what the server wants in the fleet file: `control_token_env` or `api_key_env`"
    elif status == 404 and text == "Not Found":  # FastAPI's answer for an unknown path
        text = "it has no such route"
    elif status == 503:
        hint = WHICH_TAKE_REQUESTS
    return ServerError(f"{where} answered {status}: {text}", status=status, hint=hint)


def _where(target: ServerTarget, method: str, path: str) -> str:
    return f"{target.name}: {method} {target.url}{path}"


def _shortened(text: str, target: ServerTarget) -> str:
    """One line of at most a few hundred characters, without the API key."""
    line = " ".join(text.split())
    if target.api_key:
        line = line.replace(target.api_key, "***")
    return line if len(line) <= _ERROR_TEXT_LIMIT else line[: _ERROR_TEXT_LIMIT - 1] + "…"


def _query(params: Mapping[str, QueryValue] | None) -> str:
    """`?mode=keep&tags=a&tags=b`, or nothing; a sequence repeats its key."""
    if not params:
        return ""
    return _encoded(tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in params.items()))


@lru_cache(maxsize=256)  # a fan-out sends all servers the same query
def _encoded(params: tuple[tuple[str, QueryValue], ...]) -> str:
    pairs = [(key, str(v).lower() if isinstance(v, bool) else v) for key, v in params]
    return "?" + urlencode(pairs, doseq=True)
