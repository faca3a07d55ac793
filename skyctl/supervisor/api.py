"""The supervisor's HTTP API: POST /v1/VERB for every verb of a FleetService.

The body is the verb's request, the answer its result, both as JSON (`core/service.py`). The unix
socket (mode 0600, in a directory of mode 0700) also offers those of a SupervisorService.

Both sides state their skyctl version (`wire.VERSION_HEADER`); another protocol is refused. An error
is {"error": {kind, message, hint, details}} with the class's name as its kind.
"""

from __future__ import annotations

import hmac
import inspect
import json
from dataclasses import fields
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyctl.adapters import change
from skyctl.core import service
from skyctl.core.arbiter import caller, hung_up
from skyctl.core.service import FleetService
from skyctl.errors import NotFoundError, SkyctlError, UsageError
from skyctl.supervisor import interface
from skyctl.supervisor.interface import SupervisorService
from skyctl.supervisor.wire import (
    CALLER_HEADER,
    PROTOCOL,
    VERSION_HEADER,
    adapter,
    own_version,
    stamp,
    version_mismatch,
)

_CALLER_LENGTH = 200
_TOKEN_HINT = (
    "give a copy of the fleet's supervisor.token: skyctl --token-file FILE status --fleet URL"
)
_NAMES = vars(change) | vars(service) | vars(interface)
_OF_CLIENTS = ("control", "job", "wait_job")  # composed of other verbs


def requests(offered: type[FleetService]) -> dict[str, type | None]:
    """Every verb with the type of its request, None if it takes none."""
    kinds: dict[str, type | None] = {}
    for verb, method in inspect.getmembers(offered, inspect.iscoroutinefunction):
        if not verb.startswith("_") and verb not in _OF_CLIENTS:
            request = inspect.signature(method).parameters.get("request")
            kinds[verb] = None if request is None else _NAMES[request.annotation]
    return kinds


def make_app(
    fleet: FleetService, offered: type[FleetService] = SupervisorService, *, token: str = ""
) -> Starlette:
    """The API of one fleet, with the verbs of `offered`, for callers with the `token`."""
    verbs = requests(offered)
    headers = {VERSION_HEADER: f"{own_version()}/{stamp()}"}

    async def endpoint(request: Request) -> Response:
        caller.set(unquote(request.headers.get(CALLER_HEADER, ""))[:_CALLER_LENGTH])
        hung_up.set(request.is_disconnected)
        try:
            _refuse_strangers(request, token)
            _refuse_others(request)
            verb = request.path_params["verb"]
            if verb not in verbs:
                raise NotFoundError(f"there is no verb {verb!r}")
            arguments = _arguments(verb, verbs[verb], await request.body())
            content, status = to_json(await getattr(fleet, verb)(*arguments)), 200
        except SkyctlError as error:
            shown = {**error.to_json(), "details": error.details}
            content = json.dumps({"error": shown}).encode()
            status = 404 if isinstance(error, NotFoundError) else 409
            status = 401 if isinstance(error, Stranger) else status
        return Response(content, status, headers, media_type="application/json")

    def failed(_: Request, __: Exception) -> Response:
        # with our version, or it would be taken for another skyctl; the log has the error
        return Response(status_code=500, headers=headers)

    return Starlette(
        routes=[Route("/v1/{verb}", endpoint, methods=["POST"])],
        exception_handlers={Exception: failed},
    )


class Stranger(SkyctlError):
    """A caller without the token."""


def _refuse_strangers(request: Request, token: str) -> None:
    """Raise Stranger for a caller without the token, before anything else is read."""
    if not token:
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not given:
        raise Stranger("this fleet asks for a token", hint=_TOKEN_HINT)
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise Stranger("this fleet does not know that token", hint=_TOKEN_HINT)


def _refuse_others(request: Request) -> None:
    """Raise VersionMismatch for a command that speaks another protocol, before anything is done."""
    theirs = request.headers.get(VERSION_HEADER, "")
    if theirs and theirs.partition("/")[2] != str(PROTOCOL):
        raise version_mismatch(own_version(), theirs)


def _arguments(verb: str, kind: type | None, body: bytes) -> tuple[Any, ...]:
    """The verb's arguments. Raises UsageError for what no skyctl of this protocol sends."""
    try:
        sent = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{verb}: not JSON") from error
    accepted = {field.name for field in fields(kind)} if kind is not None else set()
    if not isinstance(sent, dict) or not sent.keys() <= accepted:
        raise UsageError(f"{verb}: a request has only: {', '.join(sorted(accepted)) or 'nothing'}")
    if kind is None:
        return ()
    try:
        request: Any = adapter(kind).validate_json(body or b"{}")
    except ValidationError as error:
        # where and why, but nothing of what was sent: a plan may hold secrets
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{verb}: {where}: {first['msg']}") from None
    for name, value in vars(request).items():
        # NaN defeats every limit, and SQLite's integers have 64 bits
        if isinstance(value, int | float) and not abs(value) < 2**63:
            raise UsageError(f"{verb}: {name}: a number without bounds")
    return (request,)
