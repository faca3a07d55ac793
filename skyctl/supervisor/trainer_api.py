"""The fleet URL: vLLM's RL API for all servers of a fleet at once, for trainers' own clients.

    /get_world_size, /init_weight_transfer_engine, /start_weight_update,
    /update_weights, /finish_weight_update            one update (`supervisor/trainer_update.py`)
    /update_weights with `weight_dir`                 a push of a checkpoint, for prime-rl
    /collective_rpc                                   the same update, as SkyRL calls it
    /pause, /resume, /sleep, /wake_up, LoRA           the fleet's verbs
    /is_paused, /is_sleeping, /v1/version, …          read from all servers, or from the first
    inference                                         passed on to the router (`passing.py`)

Routes, bodies and answers are vLLM's (`vllm/entrypoints/rl/online/api_router.py`, 0.32). Clients
show the control token, or on inference routes the API key: as `Authorization: Bearer TOKEN`, or as
the password of the URL (`http://trainer:TOKEN@HOST:PORT`) where a client takes nothing but a URL.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import psutil
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.core.arbiter import caller, hung_up
from skyctl.core.requests import Pause, Resume, Sleep, Wake
from skyctl.core.results import push_result
from skyctl.engines.inside.guard import (
    TOKEN_VARIABLE,
    VLLM,
    Application,
    Guard,
    Receive,
    Routes,
    Scope,
    Send,
    is_data,
)
from skyctl.errors import (
    ConflictError,
    NotFoundError,
    PreflightError,
    SkyctlError,
    UsageError,
)
from skyctl.http.fanout import OutcomeStatus, fan_out, require_all
from skyctl.push.request import PushRequest
from skyctl.states import PauseMode, Phase
from skyctl.store.identity import ProcessIdentity, identify
from skyctl.supervisor.passing import Passing
from skyctl.supervisor.resident import Supervisor
from skyctl.supervisor.trainer_update import TrainerUpdate

VERSION = "/v1/version"
REPLACE_ADAPTER = ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter")
"""Of prime-rl and SkyRL: load an adapter whether or not its name is served."""
ROUTES = Routes(VLLM.key_variable, VLLM.data | {VERSION})
_MAX_BODY_BYTES = 64 * 1024 * 1024
_LONGEST_NAME = 200
_LONGEST_WAIT_S = 600.0
_POLL_S = 0.1
_MODES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
_EVERYWHERE = ("/reset_prefix_cache", "/reset_encoder_cache", "/abort_requests")
_FROM_THE_FIRST = ("/version", "/server_info")
Handler = Callable[[Request], Awaitable[Response]]


class TrainerApi:
    """The fleet URL of one fleet, for clients with the control `token` or the inference `key`; None
    asks for none.
    """

    def __init__(self, fleet: Supervisor, *, token: str | None, key: str | None) -> None:
        self._fleet = fleet
        self._token, self._key = token, key
        self._update = TrainerUpdate(fleet)
        self._trainer: ProcessIdentity | None = None  # of the last update
        self._passing = Passing(fleet, key)

    def app(self) -> Application:
        """The ASGI app."""
        get: dict[str, Handler] = {
            "/health": self._health,
            "/get_world_size": self._world_size,
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/weight_info": self._weight_info,
            "/v1/rl/workers": self._workers,
            VERSION: self._version,
            **dict.fromkeys(_FROM_THE_FIRST, self._of_the_first),
        }
        post: dict[str, Handler] = {
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/start_weight_update": self._start,
            "/update_weights": self._update_weights,
            "/finish_weight_update": self._finish,
            "/collective_rpc": self._collective_rpc,
            "/pause": self._pause,
            "/resume": self._resume,
            "/sleep": self._sleep,
            "/wake_up": self._wake,
            "/v1/load_lora_adapter": self._load_adapter,
            **dict.fromkeys(REPLACE_ADAPTER, self._load_adapter),
            "/v1/unload_lora_adapter": self._unload_adapter,
            **dict.fromkeys(_EVERYWHERE, self._everywhere),
        }
        routes = [Route(path, _answering(f), methods=["GET"]) for path, f in get.items()]
        routes += [Route(path, _answering(f), methods=["POST"]) for path, f in post.items()]
        every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        routes.append(Route("/{path:path}", _answering(self._other), methods=every))
        app: Application = Starlette(routes=routes, exception_handlers={Exception: _failed})
        if self._token is None:
            return app
        secrets = {TOKEN_VARIABLE: self._token, ROUTES.key_variable: self._key or ""}
        return _WithPasswords(Guard(app, environ=secrets, routes=ROUTES))

    async def close(self) -> None:
        """Undo an update that is open, and end what is passed on."""
        await self._update.close()
        await self._passing.close()

    # --- weights --------------------------------------------------------------------------------

    async def _world_size(self, _: Request) -> Response:
        return JSONResponse({"world_size": sum(t.workers for t in await self._update.targets())})

    async def _workers(self, _: Request) -> Response:
        return JSONResponse({"workers": [t.to_json() for t in await self._update.targets()]})

    async def _init(self, request: Request) -> Response:
        info = _required(await _body(request), "init_info", dict)
        await self._update.join(info, request.is_disconnected)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _shutdown(self, request: Request) -> Response:
        await _body(request)
        await self._update.dissolve(request.is_disconnected)
        return JSONResponse({"message": "Weight transfer shut down"})

    async def _start(self, request: Request) -> Response:
        await _body(request)
        return JSONResponse({"message": "Weight update started", "job": await self._begin(request)})

    async def _begin(self, request: Request) -> str:
        last = self._trainer
        self._trainer = await asyncio.to_thread(_client_process, request.scope, last)
        return await self._update.start(self._trainer, request.is_disconnected)

    async def _update_weights(self, request: Request) -> Response:
        content = await _body(request)
        if "weight_dir" in content:
            return await self._push(content["weight_dir"])
        info = _required(content, "update_info", dict, list)
        await self._update.update(info, request.is_disconnected)
        return JSONResponse({"message": "Weights updated"})

    async def _push(self, directory: Any) -> Response:
        """prime-rl's update: a checkpoint that its trainer has written, and removes later."""
        if not isinstance(directory, str) or not directory.isprintable() or directory[:1] != "/":
            raise UsageError(
                "weight_dir: the path of a checkpoint",
                hint='prime-rl: weight_broadcast.type = "filesystem"',
            )
        job = await self._fleet.start_push(PushRequest(directory, keep=True))
        result = push_result(await self._fleet.wait_job(job))
        return JSONResponse({"message": "Weights updated", "weight_version": result.version})

    async def _finish(self, request: Request) -> Response:
        version = (await _body(request)).get("weight_version")
        result = await self._update.finish("" if version is None else _name(version))
        return JSONResponse(
            {
                "message": "Weight update finished",
                "weight_version": result.version,
                "freeze_window_s": result.freeze_window_s,
            }
        )

    async def _collective_rpc(self, request: Request) -> Response:
        """SkyRL's calls of its worker extension (`NewInferenceWorkerWrap`, a956457), by those
        of vLLM that they stand for. Raises UsageError: any other method.
        """
        content = await _body(request)
        method = content.get("method")
        if method == "skyrl_start_weight_update":
            await self._begin(request)
        elif method == "update_weights_nccl":
            info = _required(_required(content, "kwargs", dict), "update_info", dict)
            await self._update.update(info, request.is_disconnected)
        elif method == "skyrl_finish_weight_update":
            await self._update.finish("")
        else:
            raise UsageError(
                "the fleet URL passes no /collective_rpc on but those of SkyRL's NCCL update: "
                "another method may change weights past the update",
                hint="call it on each server, inside `Fleet.update`: docs/trainers.md",
            )
        return JSONResponse({"results": [None]})

    async def _weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self._fleet.state.weights().version or "default"})

    async def _version(self, request: Request) -> Response:
        """The fleet's version and that of each server; `?wait=LABEL` answers once all have it."""
        wait = request.query_params.get("wait", "")
        timeout_s = min(_number(request, "timeout_s", 60.0), _LONGEST_WAIT_S)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            servers = {
                name: {"version": replica.row.weight_version, "state": replica.state}
                for name, replica in self._fleet.replicas.items()
            }
            versions = {"version": self._fleet.state.weights().version, "servers": servers}
            if not wait or all(server["version"] == wait for server in servers.values()):
                return JSONResponse(versions)
            if asyncio.get_running_loop().time() > deadline:
                raise ConflictError(f"not every server has {wait} after {timeout_s:g} s")
            if await request.is_disconnected():
                return JSONResponse(versions)
            await asyncio.sleep(_POLL_S)

    # --- verbs ----------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in _MODES:
            raise UsageError(f"mode {mode!r}: one of {', '.join(_MODES)}")
        clear = request.query_params.get("clear_cache", "true").lower() not in ("false", "0", "no")
        outcomes = await self._fleet.pause(Pause(mode=_MODES[mode], clear_cache=clear))
        require_all(outcomes, "pause")
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: Request) -> Response:
        require_all(await self._fleet.resume(Resume()), "resume")
        return JSONResponse({"status": "resumed"})

    async def _sleep(self, request: Request) -> Response:
        level = _number(request, "level", 1)
        if level not in (1, 2):
            raise UsageError("level: 1 or 2; to freeze requests alone: POST /pause")
        require_all(await self._fleet.sleep(Sleep(level=int(level))), "sleep")
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def _wake(self, request: Request) -> Response:
        tags = tuple(request.query_params.getlist("tags"))
        outcomes = await self._fleet.wake(Wake(tags=tags))
        require_all(outcomes, "wake")
        rows = {name: replica.row for name, replica in self._fleet.replicas.items()}
        skipped = [outcome for outcome in outcomes if outcome.status is OutcomeStatus.SKIPPED]
        if asleep := [outcome for outcome in skipped if rows[outcome.server].sleep_level]:
            raise ConflictError(
                "; ".join(f"{outcome.server} stays asleep: {outcome.detail}" for outcome in asleep),
                hint="/wake_up?tags=weights, update the weights, then /wake_up",
            )
        return JSONResponse({"status": "awake", "tags": list(tags) or None})

    async def _is_paused(self, _: Request) -> Response:
        return await self._whether("/is_paused", "is_paused")

    async def _is_sleeping(self, _: Request) -> Response:
        return await self._whether("/is_sleeping", "is_sleeping")

    async def _load_adapter(self, request: Request) -> Response:
        body = await _body(request)
        name, path = _name(body.get("lora_name")), body.get("lora_path")
        if not isinstance(path, str) or not path.isprintable() or not path:
            raise UsageError("lora_path: a directory")
        inplace = body.get("load_inplace") is True or request.scope["path"] in REPLACE_ADAPTER
        new = None if inplace else True
        change = await self._fleet.load_adapter(LoadAdapter(name=name, directory=path, new=new))
        served = change.adapter.served_as if change.adapter is not None else name
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully: {served}")

    async def _unload_adapter(self, request: Request) -> Response:
        name = _name((await _body(request)).get("lora_name"))
        await self._fleet.unload_adapter(UnloadAdapter(name=name))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    # --- servers --------------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        up = any(replica.phase is Phase.UP for replica in self._fleet.replicas.values())
        return Response(status_code=200 if up else 503)

    async def _whether(self, path: str, key: str) -> Response:
        """True if it holds for every server."""
        answers = await self._ask_all("GET", path)
        return JSONResponse({key: all(_field(answer, key) is True for answer in answers)})

    async def _everywhere(self, request: Request) -> Response:
        body = await _body(request)
        params = {key: str(value) for key, value in request.query_params.items()}
        answers = await self._ask_all(
            "POST", str(request.scope["path"]), params=params, json=body or None
        )
        success = all(_field(answer, "success") is not False for answer in answers)
        resets = "reset" in str(request.scope["path"])
        return JSONResponse({"success": success} if resets else {"status": "aborted"})

    async def _of_the_first(self, request: Request) -> Response:
        params = {key: str(value) for key, value in request.query_params.items()}
        [answer, *_] = await self._ask_all(
            "GET", str(request.scope["path"]), params=params, first=True
        )
        return JSONResponse(answer)

    async def _ask_all(
        self, method: str, path: str, *, first: bool = False, **how: Any
    ) -> list[Any]:
        """The answers of all servers that are up, or of the first. Raises SkyctlError."""
        timeout_s = self._fleet.require_plan().config.control_timeout_s
        targets = [r.target for r in self._fleet.replicas.values() if r.phase is Phase.UP]
        if not targets:
            raise ConflictError("no server of this fleet is up", hint="look: skyctl status")
        outcomes = await fan_out(
            targets[:1] if first else targets,
            lambda target: self._fleet.client.call(
                target, method, path, timeout_s=timeout_s, **how
            ),
            timeout_s=timeout_s,
        )
        require_all(outcomes, path)
        return [outcome.value for outcome in outcomes]

    async def _other(self, request: Request) -> Response:
        path = str(request.scope["path"])
        if not is_data(path):
            raise NotFoundError(f"the fleet URL has no route {request.method} {path[:100]!r}")
        return await self._passing.answer(request, await _raw(request))


def _answering(handler: Handler) -> Handler:
    """The handler, with errors as JSON: 4xx, since no request is improved by its repetition."""

    async def answer(request: Request) -> Response:
        caller.set(f"a trainer at {request.client.host if request.client else 'the fleet URL'}")
        hung_up.set(request.is_disconnected)
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except SkyctlError as error:
            return JSONResponse({"error": error.to_json()}, _status(error))

    return answer


def _status(error: SkyctlError) -> int:
    if isinstance(error, NotFoundError):
        return 404
    return 400 if isinstance(error, UsageError | PreflightError) else 409


def _failed(_: Request, __: Exception) -> Response:
    return JSONResponse({"error": {"message": "the supervisor's log has the error"}}, 409)


async def _raw(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MAX_BODY_BYTES:
            raise UsageError(f"the body is over {_MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body is an empty one. Raises UsageError."""
    raw = await _raw(request)
    try:
        parsed = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON") from error
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise UsageError("the body is not a JSON object")
    if not _finite(parsed):
        raise UsageError("the body has numbers or characters that are not JSON")
    return parsed


def _required(body: Mapping[str, Any], key: str, *kinds: type) -> Any:
    value = body.get(key)
    if not isinstance(value, kinds):
        raise UsageError(f"{key}: {' or '.join(kind.__name__ for kind in kinds)}, in JSON")
    return value


def _finite(value: Any) -> bool:
    """Whether it can be written as JSON again: Python reads NaN and lone surrogates as well."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
        raise UsageError(f"a name or version is a text of at most {_LONGEST_NAME} characters")
    if not value.isprintable():
        raise UsageError("a name or version has printable characters only")
    return value


def _number(request: Request, key: str, default: float) -> float:
    text = request.query_params.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise UsageError(f"{key}: a number")
    return value


def _field(answer: Any, key: str) -> Any:
    return answer.get(key) if isinstance(answer, dict) else None


def _client_process(
    scope: Mapping[str, Any], likely: ProcessIdentity | None
) -> ProcessIdentity | None:
    """The process at the other end of this connection, if it is one of ours on this machine. The
    `likely` one comes first: to look at all processes takes longer than a pause.
    """
    client, server = scope.get("client"), scope.get("server")
    if not client or not server:
        return None
    ends = tuple(client), tuple(server)
    with suppress(psutil.Error, OSError):
        if likely is not None and (process := likely.process()) is not None:
            own = getattr(process, "net_connections", None) or process.connections  # psutil < 6
            if any((tuple(each.laddr), tuple(each.raddr)) == ends for each in own("tcp")):
                return likely
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.pid and (tuple(each.laddr), tuple(each.raddr)) == ends:
                return identify(each.pid)
    return None


class _WithPasswords:
    """Turns the password of a URL into the bearer token that the guard asks for."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = [(name, _bearer(name, value)) for name, value in scope["headers"]]
        await self._app(scope, receive, send)


def _bearer(name: bytes, value: bytes) -> bytes:
    scheme, _, given = value.partition(b" ")
    if name.lower() != b"authorization" or scheme.lower() != b"basic":
        return value
    try:
        return b"Bearer " + b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b"Bearer"
