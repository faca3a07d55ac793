"""HTTP calls to servers: one client, a deadline per call, and httpx's errors mapped to ours."""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from skyctl.control.target import ServerTarget
from skyctl.control.transport import OneShotTransport
from skyctl.errors import DeadlineExceeded, ServerError, ServerUnreachable

QueryValue = str | int | float | bool | Sequence[str]

# Room for one call in flight to each of several hundred servers. No connection is kept: vLLM closes
# one after each 500, a POST must not be sent into a closing connection, and is never retried.
_MAX_CONNECTIONS = 1024
_ERROR_TEXT_LIMIT = 300


class ControlClient:
    """The one HTTP client of a process. Use as an async context manager.

    Proxies and netrc from the environment are ignored: control calls go straight to the server.
    Every method raises only `errors.py` errors. `transport` replaces the network in tests.
    """

    def __init__(self, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        if transport is None:
            transport = OneShotTransport(max_connections=_MAX_CONNECTIONS)
        self._http = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

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
        response = await self._answer(target, method, path, params, json, timeout_s)
        if not response.content.strip():
            return None
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{_where(target, method, path)} answered with something that is not JSON: "
                f"{_shortened(response.text, target)!r}",
                status=response.status_code,
            ) from error

    async def text(
        self,
        target: ServerTarget,
        path: str,
        *,
        method: str = "GET",
        params: Mapping[str, QueryValue] | None = None,
        timeout_s: float = 30.0,
    ) -> str:
        """The body as text, for routes that do not answer in JSON. Raises as `call` does."""
        return (await self._answer(target, method, path, params, None, timeout_s)).text

    async def _answer(
        self,
        target: ServerTarget,
        method: str,
        path: str,
        params: Mapping[str, QueryValue] | None,
        json: Any,
        timeout_s: float,
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        request = self._http.build_request(
            method, target.url + path, params=_query(params), json=json, headers=headers
        )
        where = _where(target, method, path)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._send(request, may_retry=method == "GET")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise DeadlineExceeded(f"{where}: no answer in {timeout_s:g} s") from error
        except httpx.ConnectError as error:
            raise ServerUnreachable(f"{where}: cannot connect ({_reason(error)})") from error
        except httpx.TransportError as error:
            raise ServerUnreachable(f"{where}: the connection broke ({_reason(error)})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{where}: {_reason(error)}") from error
        if not response.is_success:
            raise _status_error(target, where, response)
        return response

    async def _send(self, request: httpx.Request, *, may_retry: bool) -> httpx.Response:
        try:
            return await self._http.send(request)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if not may_retry or isinstance(error, httpx.ConnectError):
                raise
        return await self._http.send(request)


def error_text(body: str) -> str:
    """The human part of an error body: vLLM's and FastAPI's JSON shapes, or the text itself."""
    try:
        parsed = json_module.loads(body)
    except (ValueError, RecursionError):
        return body
    if isinstance(parsed, dict):
        found = parsed.get("error", parsed.get("detail", parsed.get("message")))
        if isinstance(found, dict):
            found = found.get("message", found)
        if found:
            return found if isinstance(found, str) else json_module.dumps(found)
    return body


def _status_error(target: ServerTarget, where: str, response: httpx.Response) -> ServerError:
    status = response.status_code
    text = _shortened(error_text(response.text), target) or response.reason_phrase
    hint = ""
    if status in (401, 403):
        hint = "name what the server wants in the fleet file: `control_token_env` or `api_key_env`"
    elif status == 404:
        hint = "vLLM has its control routes only when started with VLLM_SERVER_DEV_MODE=1"
    return ServerError(f"{where} answered {status}: {text}", status=status, hint=hint)


def _where(target: ServerTarget, method: str, path: str) -> str:
    return f"{target.name}: {method} {target.url}{path}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _shortened(text: str, target: ServerTarget) -> str:
    """One line of at most a few hundred characters, without the API key."""
    line = " ".join(text.split())
    if target.api_key:
        line = line.replace(target.api_key, "***")
    return line if len(line) <= _ERROR_TEXT_LIMIT else line[: _ERROR_TEXT_LIMIT - 1] + "…"


def _query(params: Mapping[str, QueryValue] | None) -> dict[str, Any] | None:
    """Query parameters as httpx takes them; a sequence repeats its key."""
    if params is None:
        return None
    return {key: list(v) if isinstance(v, tuple) else v for key, v in params.items()}
