"""Talking to a fleet's supervisor over its unix socket."""

from __future__ import annotations

from typing import Any

import httpx

from skyctl.errors import (
    DeadlineExceeded,
    FleetDownError,
    ServerError,
    SkyctlError,
    error_named,
)
from skyctl.fleet.paths import FleetPaths
from skyctl.supervisor.wire import VERSION_HEADER, spoken, stamp, version_mismatch

CALL_TIMEOUT_S = 15.0


class SupervisorClient:
    """One fleet's supervisor. Every call raises FleetDownError when nobody answers the socket."""

    def __init__(
        self, paths: FleetPaths, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        paths.refuse_foreign()
        self._paths = paths
        self._http = httpx.AsyncClient(
            transport=transport or httpx.AsyncHTTPTransport(uds=str(paths.socket)),
            base_url="http://supervisor/v1",
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

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
        try:
            response = await self._http.request(
                method, path, json=body, headers={VERSION_HEADER: spoken()}, timeout=timeout_s
            )
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(
                f"the supervisor of fleet {self._paths.name} did not answer in {timeout_s:g} s",
                hint="look: skyctl logs supervisor",
            ) from error
        except httpx.TransportError as error:
            raise FleetDownError(
                f"fleet {self._paths.name} is not running", hint="start it: skyctl up"
            ) from error
        if response.is_success:
            return _mapping(response)
        raise _error(response)


def _mapping(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise ServerError(
        f"the supervisor answered {response.text[:100]!r}", hint="look: skyctl logs supervisor"
    )


def _error(response: httpx.Response) -> SkyctlError:
    """The error of our tree that the supervisor named."""
    try:
        shown = response.json()["error"]
        return error_named(
            str(shown["kind"]),
            str(shown["message"]) or f"the supervisor answered {response.status_code}",
            hint=str(shown["hint"]),
            details=dict(shown["details"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        theirs = response.headers.get(VERSION_HEADER, "")
        if theirs != f"{spoken()}/{stamp()}":
            return version_mismatch(theirs, spoken())
        return ServerError(
            f"the supervisor answered {response.status_code}",
            status=response.status_code,
            hint="look: skyctl logs supervisor",
        )
