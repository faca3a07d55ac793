"""The supervisor's HTTP API: POST /v1/VERB for every verb (`core/verb_table.py`); and GET /ready,
which tells load balancers with 503 to send nothing.

The body is the verb's request, the answer its result, both as JSON. The unix socket (mode 0600, in
a directory of mode 0700) also offers the verbs of `supervisor/interface.py`.

Both sides state their skyctl version (`wire.VERSION_HEADER`); another protocol is refused. An error
is {"error": {kind, message, hint, details}} with the class's name as its kind.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from urllib.parse import unquote

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skyctl.core.arbiter import caller, hung_up
from skyctl.core.requests import Readiness
from skyctl.core.verb_table import Handlers, Q, R, Verb
from skyctl.errors import NotFoundError, SkyctlError, UsageError
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


def make_app(offered: Handlers, *, ready: Callable[[], Readiness], token: str = "") -> Starlette:
    """The API of one fleet, with the `offered` verbs, for callers with the `token`; `ready` is what
    load balancers see, which have none.
    """
    verbs = {handler.verb.name: handler for handler in offered.values()}
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
            handler = verbs[verb]
            given = decoded(handler.verb, await request.body())
            content, status = to_json(await handler.answer(given)), 200
        except SkyctlError as error:
            shown = {**error.to_json(), "details": error.details}
            content = json.dumps({"error": shown}).encode()
            status = 404 if isinstance(error, NotFoundError) else 409
            status = 401 if isinstance(error, Stranger) else status
        return Response(content, status, headers, media_type="application/json")

    async def readiness(_: Request) -> Response:
        state = ready()
        content = to_json(state)
        return Response(content, 200 if state.ready else 503, headers, "application/json")

    def failed(_: Request, __: Exception) -> Response:
        # with our version, or it would be taken for another skyctl; the log has the error
        return Response(status_code=500, headers=headers)

    return Starlette(
        routes=[
            Route("/v1/{verb}", endpoint, methods=["POST"]),
            Route("/ready", readiness, methods=["GET"]),
        ],
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


def decoded(verb: Verb[Q, R], body: bytes) -> Q | None:
    """The verb's request, None if it takes none. Raises UsageError for what no skyctl of this
    protocol sends.
    """
    try:
        sent = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{verb.name}: not JSON") from error
    bare = verb.request is NoneType
    accepted = set() if bare else {field.name for field in fields(verb.request)}  # type: ignore[arg-type]
    if not isinstance(sent, dict) or not sent.keys() <= accepted:
        listed = ", ".join(sorted(accepted)) or "nothing"
        raise UsageError(f"{verb.name}: a request has only: {listed}")
    if bare:
        return None
    try:
        request = adapter(verb.request).validate_json(body or b"{}")
    except ValidationError as error:
        # where and why, but nothing of what was sent: a plan may hold secrets
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{verb.name}: {where}: {first['msg']}") from None
    for name, value in vars(request).items():
        # NaN defeats every limit, and SQLite's integers have 64 bits
        if isinstance(value, int | float) and not abs(value) < 2**63:
            raise UsageError(f"{verb.name}: {name}: a number without bounds")
    return request
