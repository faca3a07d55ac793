"""A fleet through its supervisor's HTTP API: every verb is one request (`supervisor/api.py`)."""

from __future__ import annotations

import json
from typing import Self
from urllib.parse import quote

from skyctl.core.arbiter import own_command
from skyctl.core.service import CALL_TIMEOUT_S, FleetService, T
from skyctl.errors import DeadlineExceeded, FleetDownError, ServerError, SkyctlError, error_named
from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Answer, NoAnswer, Request, Transport, TransportError
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.wire import (
    CALLER_HEADER,
    VERSION_HEADER,
    reader,
    spoken,
    stamp,
    version_mismatch,
)

LOOK = "look: skyctl logs supervisor"


class RemoteFleet(FleetService):
    """One fleet. Every call raises FleetDownError when nobody answers."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        url: str = "http://supervisor",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._transport = transport
        self._url = f"{url}/v1"
        self._headers = headers or {}

    @classmethod
    def on_this_machine(cls, paths: FleetPaths, *, transport: Transport | None = None) -> Self:
        """By the socket in the fleet's directory. Raises SkyctlError where that is not ours."""
        return cls(paths.name, transport or by_socket(paths))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._transport.aclose()

    async def _ask(
        self, verb: str, asked: object, result: type[T], *, patience_s: float = CALL_TIMEOUT_S
    ) -> T:
        headers = {
            VERSION_HEADER: spoken(),
            CALLER_HEADER: quote(own_command()),
            "content-type": "application/json",
            **self._headers,
        }
        request = Request("POST", self._url, f"/{verb}", headers, self._encoded(asked))
        read = reader(result)
        try:
            answer = await self._transport.send(request, timeout_s=patience_s)
        except NoAnswer as error:
            raise DeadlineExceeded(
                f"the supervisor of fleet {self.name} did not answer in {patience_s:g} s",
                hint=LOOK,
            ) from error
        except TransportError as error:
            raise self._unreachable(error) from error
        if not answer.is_success:
            raise _error(answer)
        try:
            found = read(answer.body)
        except ValueError as error:
            theirs = answer.headers.get(VERSION_HEADER, "")
            if theirs and theirs != f"{spoken()}/{stamp()}":
                raise version_mismatch(theirs, spoken()) from error
            raise ServerError(
                f"the supervisor answered {answer.text[:100]!r}", hint=LOOK
            ) from error
        return found

    def _encoded(self, asked: object) -> bytes:
        return json.dumps({} if asked is None else asked, default=vars).encode()

    def _unreachable(self, error: TransportError) -> FleetDownError:
        from skyctl.core.recorded import down_error

        return down_error(self.name)


def by_socket(paths: FleetPaths) -> Transport:
    """The way to the supervisor of this machine. Raises SkyctlError where that is not ours."""
    paths.refuse_foreign()
    return KeptConnections(unix_socket=str(paths.socket))


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
            f"the supervisor answered {answer.status}", status=answer.status, hint=LOOK
        )
