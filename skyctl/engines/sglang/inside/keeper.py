"""The keeper blocks calls that would end an SGLang server, and reports the states that SGLang does
not report.

An ASGI middleware before SGLang's application. Standard library only. Read in SGLang 0.5.14 to
0.5.23 (`managers/scheduler_components/weight_updater.py`, `tokenizer_manager.py`); an assertion
there ends the scheduler, and the server with it. From 0.5.21 on an update that cannot flush fails
instead.

    call                          ends or hangs the server when        answered here
    release_memory_occupation     requests run or are held             409
                                  a tag is released already            409
    resume_memory_occupation      a tag is not released, or is there   409
                                  twice
    update_weights_from_…,        a cache of weights is shared         409
    release_memory_occupation     (weight-cache-mode)
    update_weights_from_…         it flushes, and requests are held    409
                                  the weights are released             409
    …_from_distributed            no group was made                    409
                                  not paused: it waits for requests,   409
                                  and the group waits for it
    init_weights_update_group     no sender listens there              409
                                  the group has no name                409
                                  the name is taken                    409
    destroy_weights_update_group  there is no such group               409
    pause_generation abort        requests are held in place           409
    weights_checker,              the weights are released             409
    get_weights_by_name,
    begin_, end_weight_update

    states   running ⇄ paused (abort | in_place | retract)
             resident → released {weights, kv_cache, cuda_graph} → resident; without a CPU backup
             the weights are then empty: nothing is generated before an update has filled them

The calls of this table are carried out one after the other. `GET /skyctl/state` reports all of
these states, the groups, and NCCL's variables, which workers inherit, after a question that the
scheduler answers. SGLang queues such questions (`managers/communicator.py`); one that arrives while
the next of the queue is about to be put takes its place, and that one fails with an assertion. So
questions of one kind wait here.

LoRA adapters get their names here as well (`adapters.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

try:
    from skyctl.engines.inside.guard import answer, route_path
    from skyctl.engines.sglang.inside.adapters import BASE_ALONE, LOAD, NAMED, UNLOAD, Adapters
except ImportError:  # `serve` was run by path
    from adapters import (  # type: ignore[import-not-found,no-redef]
        BASE_ALONE,
        LOAD,
        NAMED,
        UNLOAD,
        Adapters,
    )
    from skyctl_inside.guard import answer, route_path  # type: ignore[import-not-found,no-redef]

if TYPE_CHECKING:
    from skyctl.engines.inside.guard import Application, Receive, Scope, Send

STATE = "/skyctl/state"
MEMORY = ("kv_cache", "weights", "cuda_graph")
"""What SGLang releases and resumes if it is given no tags."""
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
FROM_DISK, FROM_TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"
FROM_GROUP = "/update_weights_from_distributed"
UPDATES = (FROM_DISK, FROM_TENSOR, FROM_GROUP, "/update_weights_from_ipc")
BEGIN, END = "/begin_weight_update", "/end_weight_update"
"""The session of an update from tensors or a group, since 0.5.21."""
INIT_GROUP, DESTROY_GROUP = "/init_weights_update_group", "/destroy_weights_update_group"
_GROUP = "weight_update_group"
CALLS = frozenset(
    {PAUSE, CONTINUE, RELEASE, RESUME, *UPDATES, BEGIN, END, INIT_GROUP, DESTROY_GROUP}
)
_READS = frozenset({"/weights_checker", "/get_weights_by_name"})
_QUEUED = {
    STATE: "get_internal_state",
    "/server_info": "get_internal_state",
    "/get_server_info": "get_internal_state",
    "/weights_checker": "check_weights",
    "/get_weights_by_name": "get_weights_by_name",
    "/flush_cache": "flush_cache",
}
"""The queue of SGLang's that a route's question waits in."""
_ABORT_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 5.0


class Keeper:
    """Sits before `app`, SGLang's application, whose front end `manager()` returns (its
    TokenizerManager). `unload` makes SGLang's request to drop an adapter.
    """

    def __init__(
        self, app: Application, *, manager: Callable[[], Any], unload: Callable[..., Any]
    ) -> None:
        self._app = app
        self._manager = manager
        self._adapters = Adapters(manager, unload)
        self._released: set[str] = set()
        self._empty = False  # the weights are resident, but nothing has filled them
        self._mode = "abort"  # of the last pause
        self._groups: set[str] = set()
        self._turn = asyncio.Lock()
        self._queues = {name: asyncio.Lock() for name in _QUEUED.values()}
        self._name: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path in CALLS:
            # an abort may take seconds, and nothing that follows may overtake it
            async with self._turn:
                await self._call(path, scope, receive, send)
        elif path in _QUEUED:
            async with self._queues[_QUEUED[path]]:
                await self._ask(path, scope, receive, send)
        elif path in (LOAD, UNLOAD) and self._adapters.targets() is not None:
            await self._change_adapters(path, scope, receive, send)
        elif path in BASE_ALONE:
            await self._base_alone(path, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _change_adapters(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Give a name to an adapter, take one away, or have SGLang load an adapter."""
        if (call := await _object(receive, send)) is None:
            return
        raw, body = call
        name, source = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
        if path == UNLOAD:
            self._adapters.unload(name)
        elif source.startswith(NAMED):
            if problem := self._adapters.give(name, source.removeprefix(NAMED)):
                await _refuse(send, 404, problem)
                return
        elif not self._adapters.restore(name, source):
            await self._app(scope, _replay(raw, receive), send)
            self._adapters.loaded(name)
            return
        await answer(send, 200, {"success": True, "error_message": ""})

    async def _base_alone(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await _body(receive)
        if raw is None:
            return
        with suppress(ValueError, AttributeError):
            model = json.loads(raw or b"{}").get("model")
            if isinstance(model, str) and self._adapters.serves(model):
                message = f"{path} has no LoRA adapters: send chats or completions"
                error = {"message": message, "type": "BadRequest", "param": "model", "code": 400}
                await answer(send, 400, {"error": error})
                return
        await self._app(scope, _replay(raw, receive), send)

    async def _ask(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == STATE:
            await answer(send, 200, await self._state())
        elif path in _READS and "weights" in self._released:
            await _refuse(send, 409, "the weights are released: nothing can be read")
        else:
            await self._app(scope, receive, send)

    async def _state(self) -> dict[str, Any]:
        manager = self._manager()
        await manager.get_internal_state()  # the scheduler answers even while it is paused
        arguments = manager.server_args
        return {
            "paused": bool(manager.is_pause),
            "locked": await manager.model_update_lock.is_locked(),
            "released": sorted(self._released),
            "empty": self._empty,
            "groups": sorted(self._groups),
            "nccl": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
            "memory_saver": bool(arguments.enable_memory_saver),
            "cpu_backup": bool(arguments.enable_weights_cpu_backup),
            "lora": self._adapters.targets(),
        }

    async def _call(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if (call := await _object(receive, send)) is None:
            return  # it gave up waiting for its turn, and believes what the state says
        raw, body = call
        if problem := await self._problem(path, body):
            await _refuse(send, 409, problem)
            return
        if self._name is None:
            self._name = self._manager().served_model_name

        async def watching(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                # SGLang forgets a group before it destroys it, which may fail
                done = (200, 400) if path == DESTROY_GROUP else (200,)
                if message["status"] in done:
                    self._done(path, body)
            await send(message)

        try:
            # SGLang's front end obeys no call while an abort waits for requests that do not end
            async with asyncio.timeout(_ABORT_TIMEOUT_S if path == PAUSE else None):
                await self._app(scope, _replay(raw, receive), watching)
        except TimeoutError:
            await _refuse(send, 504, f"not all ended within {_ABORT_TIMEOUT_S:g} s")

    async def _problem(self, path: str, body: Mapping[str, Any]) -> str:
        """Why SGLang must not get this call now; "" if it may."""
        manager = self._manager()
        paused, locked = bool(manager.is_pause), await manager.model_update_lock.is_locked()
        tags = _tags(body)
        shared = getattr(manager.server_args, "weight_cache_mode", "off") != "off"  # since 0.5.17
        if shared and (path in UPDATES or (path == RELEASE and "weights" in tags)):
            return "the weights are shared with other servers (weight-cache-mode)"
        if path in (RELEASE, RESUME) and len(tags) < len(body.get("tags") or MEMORY):
            return "a tag is there twice"
        if path == PAUSE and paused and locked and self._mode == "in_place":
            if body.get("mode", "abort") == "abort":
                return "requests are held in place and cannot be aborted: pause with retract first"
        elif path == CONTINUE and self._released:
            return f"{', '.join(sorted(self._released))} released: resume the memory first"
        elif path == CONTINUE and self._empty:
            return "the weights were released and nothing has filled them since: update them first"
        elif path == RELEASE:
            if again := tags & self._released:
                return f"{', '.join(sorted(again))} released already"
            if not paused or locked:
                return "requests run or are held: pause with abort first"
        elif path == RESUME and (missing := tags - self._released):
            return f"{', '.join(sorted(missing))} not released"
        elif path in (BEGIN, END) and "weights" in self._released:
            return "the weights are released: resume their memory first"
        elif path in UPDATES:
            if "weights" in self._released:
                return "the weights are released: resume their memory first"
            if paused and locked and body.get("flush_cache", True):
                return "requests are held: send flush_cache: false, or pause with abort first"
            if path == FROM_GROUP and _group(body) not in self._groups:
                return f"there is no group {_group(body)}: init_weights_update_group first"
            if path == FROM_GROUP and not paused:
                return "not paused, and the group would wait until no request runs: pause first"
        elif path == INIT_GROUP:
            if not _group(body) or _group(body) in self._groups:
                return f"the name of a group must be new: {_group(body)!r}"
            # SGLang would try for half an hour, and obey no call until then
            if not await _listens(body.get("master_address"), body.get("master_port")):
                return "no sender listens at the group's address"
        elif path == DESTROY_GROUP and _group(body) not in self._groups:
            return f"there is no group {_group(body)}"
        return ""

    def _done(self, path: str, body: Mapping[str, Any]) -> None:
        """Update the states once SGLang has answered 200."""
        if path == PAUSE:
            self._mode = str(body.get("mode", "abort"))
        elif path == RELEASE:
            self._released |= _tags(body)
        elif path == RESUME:
            arguments = self._manager().server_args
            lost = arguments.enable_memory_saver and not arguments.enable_weights_cpu_backup
            self._empty = self._empty or ("weights" in _tags(body) and lost)
            self._released -= _tags(body)
        elif path in UPDATES:
            self._empty = False
            # an update from disk names the model after its directory
            self._manager().served_model_name = self._name
        elif path == INIT_GROUP:
            self._groups.add(_group(body))
        elif path == DESTROY_GROUP:
            self._groups.discard(_group(body))


def _tags(body: Mapping[str, Any]) -> set[str]:
    return set(map(str, body.get("tags") or MEMORY))


def _group(body: Mapping[str, Any]) -> str:
    return str(body.get("group_name", _GROUP))


async def _listens(host: Any, port: Any) -> bool:
    """Whether a process takes connections there."""
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, OverflowError, TypeError):
        return False
    writer.close()
    return True


async def _refuse(send: Send, status: int, problem: str) -> None:
    await answer(send, status, {"success": False, "message": problem})


async def _body(receive: Receive) -> bytes | None:
    """None if its sender has gone: the server drops what it had sent."""
    parts = bytearray()
    while (message := await receive())["type"] == "http.request":
        parts += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(parts)
    return None


async def _object(receive: Receive, send: Send) -> tuple[bytes, dict[str, Any]] | None:
    """The body, and what it says. None if its sender has gone, or has been answered."""
    raw = await _body(receive)
    if raw is None:
        return None
    try:
        body = json.loads(raw or b"{}")
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except ValueError:
        await _refuse(send, 400, "the body is not a JSON object")
        return None
    return raw, body


def _replay(raw: bytes, receive: Receive) -> Receive:
    """A `receive` that starts with what was already read."""
    read: list[MutableMapping[str, Any]]
    read = [{"type": "http.request", "body": raw, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return read.pop() if read else await receive()

    return again
