"""A stub of an SGLang server: its front end, its scheduler, and the calls that end it.

    front end   running ⇄ paused: new requests wait. `model_update_lock` is held by those inside
    scheduler   running ⇄ paused (in_place, retract; not abort). Requests run, are held in place
                with their KV, or wait without
    memory      resident → released {kv_cache, weights, cuda_graph} → resident; weights come back
                as zeros without a CPU backup, until an update

What it does was read in SGLang 0.5.14 (`managers/scheduler.py`, `tokenizer_manager.py`,
`scheduler_components/weight_updater.py`), and most of it seen on a GPU. A failed assertion ends the
scheduler, and the server with it (`dead` says of what); one call never returns (`hung`). As 0.5.17
it returns token ids; as 0.5.21 it has sessions of updates, flushes while requests wait in a pause,
and says of which models of a rank a checksum is.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import pickle
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from skyctl.engines.sglang.inside.adapters import LOAD, UNLOAD, choose_by_model
from skyctl.engines.sglang.inside.keeper import MEMORY, Keeper
from tests.stub import rows
from tests.stub.faults import Fault, FaultLayer
from tests.stub.generation import TokenGate, next_token, prompt_ids
from tests.stub.sglang_adapters import AdapterFrontEnd, OpenAIServingBase
from tests.stub.state import digest_of_checkpoint, digest_of_updates

ZEROS = "zeros"
_GROUP = "weight_update_group"
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
STAGED: dict[bytes, bytes] = {}
"""GPU memory of a sender in this process, by the handle that it is mapped by."""
GROUPS: dict[int, StubGroup] = {}
"""The groups of senders in this process, by the port where ranks find each other."""


@dataclass
class StubGroup:
    """A broadcast is over when every rank is in it; one that is `broken` never is."""

    world_size: int
    ranks: set[int] = field(default_factory=set)
    broken: bool = False
    _receiving: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)
    _moves: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self, rank: int) -> None:
        assert 0 < rank < self.world_size and rank not in self.ranks
        self.ranks.add(rank)

    @property
    def formed(self) -> bool:
        return len(self.ranks) == self.world_size - 1

    async def receive(self, rank: int) -> bytes:
        self._receiving[rank] = asyncio.get_running_loop().create_future()
        if self._receiving.keys() == self.ranks:
            self._moves.set()
        return await self._receiving[rank]

    def end(self) -> None:
        self.broken = True
        self._moves.set()

    async def broadcast(self, data: bytes) -> None:
        await self._moves.wait()
        self._moves.clear()
        receiving, self._receiving = self._receiving, {}
        for rank in receiving.values():
            if self.broken:
                rank.set_exception(RuntimeError("NCCL communicator was aborted"))
            else:
                rank.set_result(data)


class Died(httpx.ReadError):
    """The scheduler failed an assertion; nothing answers any more, connections break."""


@dataclass(frozen=True)
class _Metadata:
    """`FlattenedTensorMetadata`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start_idx: int
    end_idx: int
    numel: int


class _Unpickler(pickle.Unpickler):
    """Lets in what SGLang's `SafeUnpickler` does, as far as a bucket has it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return lambda *arguments: STAGED[arguments[7]]
        if (module, name) == ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"):
            return _Metadata
        if module == "torch" or module.startswith("torch."):
            return tuple if name == "Size" else name
        raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")


@dataclass
class _Request:
    """One request in the scheduler. `kv` is the digest of the weights that its KV was computed
    with; "" while it waits for its prefill."""

    kv: str = ""
    rank: int = 0


class _Question:
    """A question to the scheduler, one at a time; others wait. As in SGLang, one that comes when
    the next is about to be put goes before it, which then fails (`managers/communicator.py`)."""

    def __init__(self) -> None:
        self._asked = False
        self._waiting: list[asyncio.Event] = []

    async def put(self) -> None:
        if self._asked or self._waiting:
            turn = asyncio.Event()
            self._waiting.append(turn)
            await turn.wait()
            if self._asked:
                raise HTTPException(500)
        self._asked = True
        await asyncio.sleep(0)
        self._asked = False
        if self._waiting:
            self._waiting.pop(0).set()


@dataclass
class SGLangEngine(AdapterFrontEnd):
    """Front end and scheduler of one stub server. To the keeper it is the front end."""

    model: str = "stub-model"
    served_model_name: str = "stub"
    version: str = "0.5.14"
    radix_cache: bool = True
    hicache_storage_backend: str | None = None
    memory_saver: bool = True
    cpu_backup: bool = False
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    lora: Sequence[str] | None = None  # the modules that it takes adapters for
    digest: str = ""
    weight_version: str = "default"
    is_pause: bool = False
    scheduler_paused: bool = False
    released: set[str] = field(default_factory=set)
    dead: str = ""
    hung: bool = False
    starting: bool = False
    requests: list[_Request] = field(default_factory=list)
    waiting: int = 0  # at the front end's gate
    cached: set[str] = field(default_factory=set)  # digests of the weights of what is in the tree
    stale: list[str] = field(default_factory=list)  # KV of other weights that was decoded
    session: bool = False  # an update was begun and has not ended
    zeros: int = 0  # tokens that came of weights which nobody had filled
    log: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def __post_init__(self) -> None:
        self.digest = self.digest or digest_of_checkpoint(self.model)
        self.checksums: dict[str, int] = {}
        self.groups: dict[str, tuple[StubGroup, list[int]]] = {}
        self._internal_state = _Question()
        self.changed = asyncio.Condition()
        self.aborts = 0
        self.on_death: Callable[[], object] = lambda: None
        self.model_update_lock = SimpleNamespace(is_locked=self._is_locked)
        self.server_args = SimpleNamespace(
            enable_memory_saver=self.memory_saver,
            enable_weights_cpu_backup=self.cpu_backup,
            enable_lora=self.lora is not None,
            lora_target_modules=self.lora,
            served_model_name=self.served_model_name,
            model_path=self.model,
        )
        self.init_adapters(self.lora)

    @property
    def since(self) -> tuple[int, ...]:
        """The release that it answers as."""
        return tuple(map(int, self.version.split(".")))

    @property
    def has_sessions(self) -> bool:
        return self.since >= (0, 5, 21)

    def begin_update(self) -> str:
        """Why it failed; "" when it did not."""
        self._alive()
        if "weights" in self.released:
            self._die("weights were restored in memory that is released")
        if self.session:
            return "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return ""

    def end_update(self) -> str:
        self._alive()
        if not self.session:
            return "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return ""

    def _outside_session(self, kind: str) -> str:
        if not self.has_sessions or self.session:
            return ""
        return f"{kind} must run between begin_weight_update() and end_weight_update()"

    async def get_internal_state(self) -> list[dict[str, Any]]:
        self._alive()
        await self._internal_state.put()
        return [{}]

    async def _is_locked(self) -> bool:
        return bool(self.requests)

    # the front end

    async def pause(self, mode: str) -> None:
        await self._front_end()
        if mode == "abort":
            if self.scheduler_paused and any(request.kv for request in self.requests):
                self.hung = True  # it waits for the end of what is held in place
                await self._front_end()
            self.is_pause = True
            self.aborts += 1
            await self._notify()
            async with self.changed:
                await self.changed.wait_for(lambda: not self.requests or bool(self.dead))
        else:
            self.is_pause = self.scheduler_paused = True
            if mode == "retract":
                for request in self.requests:
                    request.kv = ""
        await self._notify(f"pause {mode}")

    async def resume(self) -> None:
        await self._front_end()
        self.is_pause = self.scheduler_paused = False
        await self._notify("continue")

    async def _front_end(self) -> None:
        """Behind an abort that never ends nothing is carried out."""
        self._alive()
        if self.hung:
            await asyncio.Event().wait()

    async def update_from_disk(self, body: Mapping[str, Any]) -> str:
        """Why it failed; "" when it did not."""
        self._alive()
        if not self.is_pause:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.requests)
        path = body["model_path"]
        if not Path(path).is_dir():  # noqa: ASYNC240 # nothing else runs here
            return f"Failed to update weights: no model at {path}"
        if "weights" in self.released:
            self._die("weights were loaded into memory that is released")
        self.digest = digest_of_checkpoint(path)
        if problem := self._flush_after_update(body):
            return problem
        self.model = self.served_model_name = path
        if body.get("weight_version"):
            self.weight_version = body["weight_version"]
        self.log.append("update")
        return ""

    async def update_from_tensor(self, body: Mapping[str, Any]) -> str:
        """Tensors that were there stay, but for those that come."""
        await self._updatable()
        if problem := self._outside_session("update_weights_from_tensor"):
            return problem
        assert body["load_format"] == "flattened_bucket"
        raw = base64.b64decode(body["serialized_named_tensors"][0], validate=True)
        bucket = _Unpickler(io.BytesIO(raw)).load()
        buffer = bucket["flattened_tensor"]
        found = {}
        for one in bucket["metadata"]:
            assert one.end_idx - one.start_idx == one.numel
            found[one.name] = buffer[one.start_idx : one.end_idx]
        return self._load(found, body)

    def init_group(self, body: Mapping[str, Any]) -> str:
        """Why it failed; "" when it did not. Each rank comes to the sender's store."""
        self._alive()
        name, group = body.get("group_name", _GROUP), GROUPS.get(body["master_port"])
        if not name:
            self._die("Group name cannot be empty")
        if group is None:
            self.hung = True  # until torch gives up, in half an hour
            return "nobody is there"
        if name in self.groups:
            return "The specified group name has already been created"
        assert body["world_size"] == group.world_size and body["backend"] == "nccl"
        ranks = [body["rank_offset"] + rank for rank in range(self.tp_size)]
        for rank in ranks:
            group.join(rank)
        self.groups[name] = group, ranks
        self.log.append("join")
        return ""

    def destroy_group(self, body: Mapping[str, Any]) -> str:
        self._alive()
        if self.groups.pop(body.get("group_name", _GROUP), None) is None:
            return "The group to be destroyed does not exist."
        self.log.append("leave")
        return ""

    async def update_from_group(self, body: Mapping[str, Any]) -> str:
        """Receive one bucket, whose tensors are views of it: they must be aligned."""
        await self._updatable()
        if problem := self._outside_session("update_weights_from_distributed"):
            return problem
        name = body.get("group_name", _GROUP)
        if name not in self.groups:
            self._die(f"Group {name} not in {list(self.groups)}.")
        assert body["load_format"] == "flattened_bucket"
        group, ranks = self.groups[name]
        try:
            buckets = await asyncio.gather(*map(group.receive, ranks))
        except RuntimeError as error:
            return f"Failed to update parameter online: {error}."
        found, at = {}, 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            size = _BYTES[dtype] * math.prod(shape)
            if at % _BYTES[dtype]:
                return "self.storage_offset() must be divisible by 4"
            found[name] = buckets[0][at : at + size]
            at += size
        assert all(len(bucket) == at for bucket in buckets)
        return self._load(found, body)

    async def _updatable(self) -> None:
        self._alive()
        if not self.is_pause:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.requests)
        if "weights" in self.released:
            self._die("weights were loaded into memory that is released")

    def _load(self, found: Mapping[str, bytes], body: Mapping[str, Any]) -> str:
        if not self.checksums:
            self.checksums = rows.checksums_of_checkpoint(self.model)
        self.checksums |= {name: zlib.crc32(data) for name, data in found.items()}
        update = {"names": list(self.checksums), "crc32": list(self.checksums.values())}
        self.digest = digest_of_updates([update])
        if problem := self._flush_after_update(body):
            return problem
        self.log.append("update")
        return ""

    def _flush_after_update(self, body: Mapping[str, Any]) -> str:
        if not body.get("flush_cache", True) or self.flush():
            return ""
        if not self.has_sessions:
            self._die("Cache flush failed after updating weights")
        return "Weights were updated, but the cache was not flushed"

    # the scheduler

    def flush(self) -> bool:
        self._alive()
        waits = self.has_sessions and self.scheduler_paused
        held = [request for request in self.requests if request.kv or not waits]
        if not held:
            self.cached.clear()
        if any(request.rank == 0 for request in held):  # what other ranks say is dropped
            return False
        self.log.append("flush")
        return True

    def release(self, tags: list[str]) -> None:
        self._alive()
        if self.requests:
            self._die("release_memory_occupation should be called only when server is idle.")
        tags = tags or list(MEMORY)
        if self.released & set(tags):
            self._die("memory that is released was read")
        self.released |= set(tags)  # whether or not that frees anything
        if "kv_cache" in tags:
            self.cached.clear()
        self.log.append(f"release {','.join(tags)}")

    def resume_memory(self, tags: list[str]) -> None:
        self._alive()
        for tag in tags or MEMORY:
            if tag not in self.released:
                self._die(f"KeyError: {tag!r}")
            self.released.remove(tag)
        if "weights" in (tags or MEMORY) and self.memory_saver and not self.cpu_backup:
            self.digest = ZEROS
        self.log.append(f"resume {','.join(tags)}")

    async def generate(
        self,
        gate: TokenGate,
        prompt: list[int],
        most: int,
        delay_s: float = 0.0,
        adapter: str = "",
    ) -> AsyncIterator[int | None]:
        """Token ids; None at the end of a request that was aborted. Raises ValueError: there is no
        such adapter."""
        rid, state = object(), SimpleNamespace(obj=SimpleNamespace(lora_id=None))
        self.rid_to_state[str(id(rid))] = state
        self.waiting += 1
        try:
            await self._until(lambda: not self.is_pause)
            if adapter:
                state.obj.lora_id = await self.acquire(adapter)
        except BaseException:
            del self.rid_to_state[str(id(rid))]
            raise
        finally:
            self.waiting -= 1
        request, aborts, tokens = _Request(), self.aborts, list(prompt)
        self.requests.append(request)
        self.prompt_tokens += len(prompt)
        try:
            for _ in range(most):
                await asyncio.sleep(delay_s)
                step = asyncio.create_task(gate.pass_one())
                abort = asyncio.create_task(self._until(lambda: self._aborted(request, aborts)))
                try:
                    await asyncio.wait({step, abort}, return_when=asyncio.FIRST_COMPLETED)
                    await self._until(
                        lambda: self._aborted(request, aborts) or not self.scheduler_paused
                    )
                finally:
                    step.cancel()
                    abort.cancel()
                if self._aborted(request, aborts):
                    yield None
                    return
                self._step(request)
                weights = self.digest + self._adapted(state.obj.lora_id)
                token = 0 if self.digest == ZEROS else next_token(weights, tokens)
                self.zeros += self.digest == ZEROS
                tokens.append(token)
                self.generation_tokens += 1
                yield token
        finally:
            self.requests.remove(request)
            del self.rid_to_state[str(id(rid))]
            if state.obj.lora_id:
                self.lora_registry._counters[state.obj.lora_id] -= 1
            await self._notify()

    def _adapted(self, adapter: str | None) -> str:
        if adapter is None:
            return ""
        if adapter not in self.adapters:
            self._die(f"KeyError: {adapter!r}")
        if self.adapters[adapter].fatal:
            self._die(self.adapters[adapter].fatal)
        return self.adapters[adapter].digest

    def _aborted(self, request: _Request, aborts: int) -> bool:
        """One that is held in place is marked, and ends with its next step."""
        return self.aborts != aborts and not (self.scheduler_paused and request.kv)

    def _step(self, request: _Request) -> None:
        if request.kv:
            return  # what it has of other weights is its own
        if self.radix_cache:
            self.stale += [f"{kv} under {self.digest}" for kv in self.cached - {self.digest}]
            self.cached.add(self.digest)
        request.kv = self.digest

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: bool(self.dead) or condition())
        self._alive()

    async def _notify(self, entry: str = "") -> None:
        async with self.changed:
            self.log += [entry] if entry else []
            self.changed.notify_all()

    def _alive(self) -> None:
        if self.dead:
            raise Died(self.dead)

    def _die(self, why: str) -> NoReturn:
        self.dead = why
        self.on_death()
        raise Died(why)


class SGLangStub:
    """One stub SGLang server as an ASGI app (`asgi`). Without `keeper` it is one that skyctl did
    not start."""

    def __init__(
        self,
        engine: SGLangEngine | None = None,
        *,
        keeper: bool = True,
        keys: tuple[str | None, str | None] = (None, None),
        faults: Mapping[str, Fault] | None = None,
        token_delay_s: float = 0.0,
        serving: type[OpenAIServingBase] = OpenAIServingBase,
    ) -> None:
        self.engine = engine or SGLangEngine()
        self._serving = type("Serving", (serving,), {}) if keeper else serving
        if keeper:
            choose_by_model(self._serving, HTTPException)
        self.gate = TokenGate()
        self._keys = keys
        self._token_delay_s = token_delay_s
        more = [Middleware(self._auth)]
        if keeper:
            more.append(Middleware(Keeper, manager=lambda: self.engine, unload=SimpleNamespace))
        self.app = self._app(more)
        self.asgi = FaultLayer(self.app, faults or {})

    def _app(self, middleware: list[Middleware]) -> Starlette:
        get = {
            "/health": self._health,
            "/v1/models": self._models,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/metrics": self._metrics,
        }
        post = {
            "/generate": self._generate,
            "/v1/completions": self._completions,
        }
        managed = {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/update_weights_from_disk": self._update,
            "/update_weights_from_distributed": self._distributed,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._version,
            "/weights_checker": self._checker,
            "/flush_cache": self._flush,
            LOAD: self._load_adapter,
            UNLOAD: self._unload_adapter,
        }
        if self.engine.has_sessions:
            managed |= {
                "/begin_weight_update": self._begin_update,
                "/end_weight_update": self._end_update,
            }
        self._managed = frozenset(managed)
        routes = [Route(path, self._alive(one), methods=["GET"]) for path, one in get.items()]
        post |= managed
        routes += [Route(path, self._alive(one), methods=["POST"]) for path, one in post.items()]
        routes.append(Route("/stub/state", self._state, methods=["GET"]))
        return Starlette(routes=routes, middleware=middleware)

    def _auth(self, app: ASGIApp) -> ASGIApp:
        """As `utils/auth.py`: managed routes want the admin key, where there is one. All others
        want the users' key, and so do paths that there are not."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                request, (key, admin) = Request(scope), self._keys
                wanted = (admin or key) if request.url.path in self._managed else key
                open_route = request.url.path in ("/health", "/metrics", "/stub/state")
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if wanted and not open_route and given != wanted:
                    await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                    return
            await app(scope, receive, send)

        return guarded

    def _alive(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        async def alive(request: Request) -> Response:
            self.engine._alive()
            response: Response = await handler(request)
            return response

        return alive

    async def _health(self, _: Request) -> Response:
        if self.engine.starting:
            return Response(status_code=503)
        return Response()  # with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false

    async def _models(self, _: Request) -> Response:
        name = self.engine.served_model_name
        base = {"id": name, "root": name, "parent": None, "max_model_len": 4096}
        return JSONResponse({"data": [base, *self.engine.cards()]})

    async def _model_info(self, _: Request) -> Response:
        engine = self.engine
        return JSONResponse({"model_path": engine.model, "weight_version": engine.weight_version})

    async def _server_info(self, _: Request) -> Response:
        await self.engine.get_internal_state()
        return JSONResponse(
            {
                "model_path": self.engine.model,
                "load_format": "auto",
                "tp_size": self.engine.tp_size,
                "pp_size": self.engine.pp_size,
                "dp_size": self.engine.dp_size,
                "disable_radix_cache": not self.engine.radix_cache,
                "enable_lora": self.engine.lora is not None,
                "lora_target_modules": self.engine.lora,
                "hicache_storage_backend": self.engine.hicache_storage_backend,
                "version": self.engine.version,
            }
        )

    async def _loads(self, _: Request) -> Response:
        running = len(self.engine.requests)
        return JSONResponse({"loads": [{"num_running_reqs": running, "num_waiting_reqs": 0}]})

    async def _metrics(self, _: Request) -> Response:
        engine, labels = self.engine, 'engine_type="unified",model_name="stub",tp_rank="0"'
        return PlainTextResponse(
            f"# TYPE sglang:num_running_reqs gauge\n"
            # of the last prefill, which did not count its own requests
            f"sglang:num_running_reqs{{{labels}}} {float(max(len(engine.requests) - 1, 0))}\n"
            f"sglang:num_queue_reqs{{{labels}}} 0.0\n"
            f"sglang:token_usage{{{labels}}} 0.25\n"
            f"sglang:prompt_tokens_total{{{labels}}} {float(engine.prompt_tokens)}\n"
            f"sglang:generation_tokens_total{{{labels}}} {float(engine.generation_tokens)}\n"
            f"sglang:cached_tokens_total{{{labels}}} 3.0\n"
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        generated = self.engine.generate(
            self.gate,
            body["input_ids"],
            body["sampling_params"]["max_new_tokens"],
            self._token_delay_s,
            body.get("lora_path") or "",
        )
        try:
            tokens = [token async for token in generated]
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        aborted = tokens[-1:] == [None]
        return JSONResponse(
            {
                "output_ids": tokens[: -1 if aborted else None],
                "meta_info": {
                    "finish_reason": {"type": "abort" if aborted else "length"},
                    "weight_version": self.engine.weight_version,
                },
            }
        )

    async def _completions(self, request: Request) -> Response:
        """OpenAI's format has token ids only since 0.5.17."""
        body = await request.json()
        ids = bool(body.get("return_token_ids")) and self.engine.since >= (0, 5, 17)
        prompt, most = prompt_ids(body), int(body.get("max_tokens", 16))
        try:
            serving = self._serving(self.engine)
            adapter = serving._resolve_lora_path(body.get("model", ""), body.get("lora_path"))
            tokens = self.engine.generate(
                self.gate, prompt, most, self._token_delay_s, adapter or ""
            )
            if body.get("stream"):
                events = _events(tokens, most, prompt if ids else None)
                return StreamingResponse(events, media_type="text/event-stream")
            made = [token async for token in tokens]
        except HTTPException as error:
            return JSONResponse({"error": {"message": error.detail}}, error.status_code)
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        choice = {
            "index": 0,
            "text": "".join(chr(token) for token in made if token is not None),
            "finish_reason": "abort" if made[-1] is None else "length",
        }
        return JSONResponse({"object": "text_completion", "choices": [choice]})

    async def _pause(self, request: Request) -> Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            return JSONResponse({"error": {"message": f"mode {mode}"}}, 400)
        await self.engine.pause(mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await request.json()
        await self.engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _release(self, request: Request) -> Response:
        self.engine.release((await request.json()).get("tags") or [])
        return JSONResponse(None)

    async def _resume(self, request: Request) -> Response:
        self.engine.resume_memory((await request.json()).get("tags") or [])
        return JSONResponse(None)

    async def _update(self, request: Request) -> Response:
        return _came_to(await self.engine.update_from_disk(await request.json()))

    async def _from_tensor(self, request: Request) -> Response:
        return _came_to(await self.engine.update_from_tensor(await request.json()))

    async def _begin_update(self, request: Request) -> Response:
        await request.json()
        return _came_to(self.engine.begin_update())

    async def _end_update(self, request: Request) -> Response:
        await request.json()
        return _came_to(self.engine.end_update())

    async def _distributed(self, request: Request) -> Response:
        return _came_to(await self.engine.update_from_group(await request.json()))

    async def _init_group(self, request: Request) -> Response:
        problem = self.engine.init_group(await request.json())
        await self.engine._front_end()
        return _came_to(problem)

    async def _destroy_group(self, request: Request) -> Response:
        return _came_to(self.engine.destroy_group(await request.json()))

    async def _load_adapter(self, request: Request) -> Response:
        body = await request.json()
        return _updated(await self.engine.load_adapter(body["lora_name"], body["lora_path"]))

    async def _unload_adapter(self, request: Request) -> Response:
        return _updated(await self.engine.unload_adapter((await request.json())["lora_name"]))

    async def _version(self, request: Request) -> Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self.engine.aborts += 1
        self.engine.weight_version = body["new_version"]
        return JSONResponse({"success": True, "new_version": body["new_version"]})

    async def _checker(self, _: Request) -> Response:
        if "weights" in self.engine.released:
            self.engine._die("memory that is released was read")
        size = self.engine.tp_size
        sizes = {
            "tp_size": size,
            "pp_size": self.engine.pp_size,
            "dp_size": 1,  # of attention
        }
        ranks = [
            {
                "checksums": {"model.embed_tokens.weight": self.engine.digest},
                "per_gpu_checksum": self.engine.digest,
                "parallelism_info": self._places(
                    {"tp_rank": rank, "pp_rank": 0, "dp_rank": copy, **sizes}
                ),
            }
            for copy in range(self.engine.dp_size)
            for rank in range(size)  # of the first stage: others have no way to answer
        ]
        return JSONResponse({"success": True, "message": "Success.", "ranks": ranks})

    def _places(self, place: dict[str, int]) -> Any:
        return [{"role": "target", **place}] if self.engine.has_sessions else place

    async def _flush(self, _: Request) -> Response:
        if self.engine.flush():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running.\n", 400)

    async def _state(self, _: Request) -> Response:
        """What tests want to know of a stub in another process; the tests' own route."""
        engine = self.engine
        return JSONResponse(
            {
                "digest": engine.digest,
                "paused": engine.is_pause,
                "released": sorted(engine.released),
                "weight_version": engine.weight_version,
                "log": engine.log,
                "stale": engine.stale,
                "dead": engine.dead,
            }
        )


def _updated(problem: str) -> Response:
    """`LoRAUpdateOutput`."""
    content = {"success": not problem, "error_message": problem}
    return JSONResponse(content, 400 if problem else 200)


def _came_to(problem: str) -> Response:
    content = {"success": not problem, "message": problem or "Succeeded", "num_paused": 0}
    return JSONResponse(content, 400 if problem else 200)


async def _events(
    tokens: AsyncIterator[int | None], most: int, prompt: list[int] | None
) -> AsyncIterator[str]:
    count = 0
    async for token in tokens:
        count += 1
        finish = "abort" if token is None else "length" if count == most else None
        text = "" if token is None else chr(token)
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
        if prompt is not None:
            choice["token_ids"] = [] if token is None else [token]
            choice |= {"prompt_token_ids": prompt} if count == 1 else {}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"
