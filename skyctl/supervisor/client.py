"""Talking to a fleet's supervisor over its unix socket."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from skyctl.core.arbiter import own_command
from skyctl.errors import (
    DeadlineExceeded,
    FleetDownError,
    ServerError,
    SkyctlError,
    error_named,
)
from skyctl.http.client import json_body
from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Answer, NoAnswer, Request, Transport, TransportError
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.wire import CALLER_HEADER, VERSION_HEADER, spoken, stamp, version_mismatch

CALL_TIMEOUT_S = 15.0


class SupervisorClient:
    """One fleet's supervisor. Every call raises FleetDownError when nobody answers the socket."""

    def __init__(self, paths: FleetPaths, *, transport: Transport | None = None) -> None:
        paths.refuse_foreign()
        self._paths = paths
        self._transport = transport or KeptConnections(unix_socket=str(paths.socket))

    async def close(self) -> None:
        await self._transport.aclose()

    async def get(self, path: str, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """The JSON of a GET under /v1."""
        return await self._call("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """The JSON of a POST under /v1. Raises the error the supervisor answered with."""
        return await self._call("POST", path, body, timeout_s)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        headers = {VERSION_HEADER: spoken(), CALLER_HEADER: quote(own_command())}
        if body is not None:
            headers["content-type"] = "application/json"
        sent = None if body is None else json_body(body)
        try:
            answer = await self._transport.send(
                Request(method, "http://supervisor/v1", path, headers, sent), timeout_s=timeout_s
            )
        except NoAnswer as error:
            raise DeadlineExceeded(
                f"the supervisor of fleet {self._paths.name} did not answer in {timeout_s:g} s",
                hint="look: skyctl logs supervisor",
            ) from error
        except TransportError as error:
            raise FleetDownError(
                f"fleet {self._paths.name} is not running", hint="start it: skyctl up"
            ) from error
        if answer.is_success:
            return _mapping(answer)
        raise _error(answer)


def _mapping(answer: Answer) -> dict[str, Any]:
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise ServerError(
        f"the supervisor answered {answer.text[:100]!r}", hint="look: skyctl logs supervisor"
    )


def _error(answer: Answer) -> SkyctlError:
    """The error of our tree that the supervisor named."""
    try:
        shown = json.loads(answer.body)["error"]
        return error_named(
            str(shown["kind"]),
            str(shown["message"]) or f"the supervisor answered {answer.status}",
            hint=str(shown["hint"]),
            details=dict(shown["details"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        theirs = answer.headers.get(VERSION_HEADER, "")
        if theirs != f"{spoken()}/{stamp()}":
            return version_mismatch(theirs, spoken())
        return ServerError(
            f"the supervisor answered {answer.status}",
            status=answer.status,
            hint="look: skyctl logs supervisor",
        )
