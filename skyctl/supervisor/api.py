"""The supervisor's HTTP API on its unix socket (mode 0600, in a directory of mode 0700).

GET  /v1/status     ?fresh=0                 FleetStatus   0: whether paused, as last probed
                    ?operation=2             with that operation, if it has ended
POST /v1/reconcile  {plan, kind}             {operation, joined}   0: nothing to do
POST /v1/adopt      {plan}                   {operation}   as it runs; 0: it has a plan already
GET  /v1/recover                             {findings, recovered}   asked now; of the last one
POST /v1/recover    {}                       {operation}
POST /v1/restart    {servers}                {operation}
POST /v1/undo       {}                       {}            stops the operation and what it started
POST /v1/down       {drain_timeout_s}        {}            answers when everything is stopped
POST /v1/verbs/V    {arguments, servers, timeout_s}   {outcomes}
POST /v1/jobs       {request}                {id}
GET  /v1/jobs/J     ?after=SEQUENCE&wait_s=20  JobChanges  when there are any, after wait_s, or at
                                             once when it is over
POST /v1/adapters/load    LoadAdapter        AdapterChange
POST /v1/adapters/unload  UnloadAdapter      AdapterChange
POST /v1/verify     {timeout_s}              {servers, agree}

Both sides say which skyctl they are (`wire.VERSION_HEADER`); another protocol is refused.
An error is {"error": {kind, message, hint, details}} with the class's name as its kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyctl.adapters import LoadAdapter, UnloadAdapter
from skyctl.core.arbiter import caller
from skyctl.core.following import CHANGES_WAIT_S, job_changes
from skyctl.core.jobs import verify_servers
from skyctl.core.plan import FleetPlan
from skyctl.errors import NotFoundError, SkyctlError, UsageError
from skyctl.push.request import PushRequest
from skyctl.supervisor.report import report
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.wire import (
    CALLER_HEADER,
    PROTOCOL,
    VERSION_HEADER,
    plan_from_json,
    spoken,
    stamp,
    version_mismatch,
)

Answer = dict[str, Any]
_CALLER_LENGTH = 200


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReconcileBody(_Body):
    plan: dict[str, Any]
    kind: str = "up"


class AdoptBody(_Body):
    plan: dict[str, Any]


class RestartBody(_Body):
    servers: list[str] = []


class DownBody(_Body):
    drain_timeout_s: float


class VerbBody(_Body):
    arguments: dict[str, Any] = {}
    servers: list[str] | None = None
    timeout_s: float


class JobBody(_Body):
    request: dict[str, Any]


class VerifyBody(_Body):
    timeout_s: float = 120.0


class NoBody(_Body):
    pass


BodyType = TypeVar("BodyType", bound=_Body)


@cache
def _push_requests() -> TypeAdapter[PushRequest]:
    """Building it takes ten times as long as what it validates."""
    return TypeAdapter(PushRequest)


def make_app(supervisor: Supervisor) -> Starlette:
    """The API of one supervisor."""

    async def status(request: Request) -> Answer:
        fresh = request.query_params.get("fresh") != "0"
        found = await report(supervisor, fresh=fresh)
        asked = request.query_params.get("operation", "")
        # one that has ended is told of also when the next has begun
        if asked.isdigit() and (ended := supervisor.ended_operation(int(asked))) is not None:
            found = replace(found, operation=ended)
        return found.to_json()

    async def reconcile(request: Request) -> Answer:
        body = await _parsed(request, ReconcileBody)
        operation, joined = supervisor.reconcile(_plan(request, body.plan), body.kind)
        return {"operation": operation, "joined": joined}

    async def adopt(request: Request) -> Answer:
        body = await _parsed(request, AdoptBody)
        return {"operation": supervisor.adopt(_plan(request, body.plan))}

    async def findings(request: Request) -> Answer:
        found = await supervisor.findings()
        return {
            "findings": [one.to_json() for one in found],
            "recovered": [one.to_json() for one in supervisor.recovered],
        }

    async def recover(request: Request) -> Answer:
        await _parsed(request, NoBody)
        return {"operation": supervisor.recover()}

    async def restart(request: Request) -> Answer:
        body = await _parsed(request, RestartBody)
        return {"operation": supervisor.restart(body.servers)}

    async def undo(request: Request) -> Answer:
        await _parsed(request, NoBody)
        await supervisor.undo()
        return {}

    async def down(request: Request) -> Answer:
        body = await _parsed(request, DownBody)
        await supervisor.down(drain_timeout_s=body.drain_timeout_s)
        return {}

    async def verb(request: Request) -> Answer:
        body = await _parsed(request, VerbBody)
        name = request.path_params["verb"]
        outcomes = await supervisor.verb(name, body.arguments, body.servers or (), body.timeout_s)
        return {"outcomes": outcomes}

    async def start_job(request: Request) -> Answer:
        body = await _parsed(request, JobBody)
        with _refusing(request):
            PushRequest.from_json(body.request)  # which knows every key
            asked = _push_requests().validate_python(body.request)
        return {"id": (await supervisor.start_push(asked)).id}

    async def job(request: Request) -> Answer:
        asked, name = request.query_params, request.path_params["job"]
        try:
            after, wait_s = int(asked.get("after", 0)), float(asked.get("wait_s", 0))
        except ValueError as error:
            raise UsageError(f"{request.url.path}: {error}") from None
        wait_s = min(wait_s, CHANGES_WAIT_S)
        return (await job_changes(supervisor.state, name, after, wait_s=wait_s)).to_json()

    async def verify(request: Request) -> Answer:
        body = await _parsed(request, VerifyBody)
        targets = [r.target for r in supervisor.named(()) if r.phase == "up"]
        return await verify_servers(
            targets, supervisor.client, supervisor.state, timeout_s=body.timeout_s
        )

    async def load_adapter(request: Request) -> Answer:
        with _refusing(request):
            asked = TypeAdapter(LoadAdapter).validate_json(await request.body())
        return asdict(await supervisor.load_adapter(asked))

    async def unload_adapter(request: Request) -> Answer:
        with _refusing(request):
            asked = TypeAdapter(UnloadAdapter).validate_json(await request.body())
        return asdict(await supervisor.unload_adapter(asked))

    posts: dict[str, Callable[[Request], Awaitable[Answer]]] = {
        "/v1/reconcile": reconcile,
        "/v1/adopt": adopt,
        "/v1/recover": recover,
        "/v1/restart": restart,
        "/v1/undo": undo,
        "/v1/down": down,
        "/v1/verbs/{verb}": verb,
        "/v1/jobs": start_job,
        "/v1/verify": verify,
        "/v1/adapters/load": load_adapter,
        "/v1/adapters/unload": unload_adapter,
    }
    gets = {"/v1/status": status, "/v1/recover": findings, "/v1/jobs/{job}": job}
    routes = [Route(path, _answering(call), methods=["GET"]) for path, call in gets.items()]
    routes += [Route(path, _answering(call), methods=["POST"]) for path, call in posts.items()]
    return Starlette(routes=routes)


def _answering(
    call: Callable[[Request], Awaitable[Answer]],
) -> Callable[[Request], Awaitable[JSONResponse]]:
    """The call as an endpoint: our errors become their JSON."""

    headers = {VERSION_HEADER: f"{spoken()}/{stamp()}"}

    async def endpoint(request: Request) -> JSONResponse:
        caller.set(unquote(request.headers.get(CALLER_HEADER, ""))[:_CALLER_LENGTH])
        try:
            _refuse_others(request)
            return JSONResponse(await call(request), headers=headers)
        except SkyctlError as error:
            shown = {
                "kind": error.kind,
                "message": error.message,
                "hint": error.hint,
                "details": error.details,
            }
            status = 404 if isinstance(error, NotFoundError) else 409
            return JSONResponse({"error": shown}, status_code=status, headers=headers)

    return endpoint


def _refuse_others(request: Request) -> None:
    """Raise VersionMismatch for a command that speaks another protocol, before anything is done."""
    theirs = request.headers.get(VERSION_HEADER, "")
    if theirs and theirs.partition("/")[2] != str(PROTOCOL):
        raise version_mismatch(spoken(), theirs)


def _plan(request: Request, data: dict[str, Any]) -> FleetPlan:
    with _refusing(request):
        return plan_from_json(data)


@contextmanager
def _refusing(request: Request) -> Iterator[None]:
    """A body inside a body that is not what a skyctl of this protocol writes is a UsageError."""
    try:
        yield
    except ValidationError as error:
        raise _usage_error(request, error) from None
    except TypeError as error:
        raise UsageError(f"{request.url.path}: {error}") from error


async def _parsed(request: Request, body_type: type[BodyType]) -> BodyType:
    try:
        return body_type.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise _usage_error(request, error) from None


def _usage_error(request: Request, error: ValidationError) -> UsageError:
    """Where and why, and nothing of what was sent: a plan may hold secrets."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return UsageError(f"{request.url.path}: {where}: {first['msg']}")
