"""The stub's HTTP routes, with vLLM's paths, answers and error shapes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.stub import fit
from tests.stub.adapters import AdapterRefused, Loaded, StubAdapters
from tests.stub.copies import StubCopies
from tests.stub.faults import Fault, FaultLayer
from tests.stub.generation import Token, TokenGate, generate, prompt_ids
from tests.stub.group import StubGroup, StubPeers
from tests.stub.rows import answers, parts, write
from tests.stub.state import EngineRefused, StubEngine

Handler = Callable[[Request], Awaitable[Response]]


REFUSED_WHILE_PAUSED = "Generation is paused. Please retry after it resumes."


class StubCore:
    """vLLM's client of its engine core, as far as pauses go; the second verb is new in 0.33."""

    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine
        if engine.since >= (0, 33):
            self.pause_generation_async = self._pause_generation

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self._engine.pause(mode)

    async def _pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._engine.pause_generation(mode)


class StubServer:
    """One stub vLLM server as an ASGI app (`asgi`), with its engine, faults and token gate;
    `middleware` is what skyctl puts in front of it.
    """

    def __init__(
        self,
        engine: StubEngine | None = None,
        *,
        served_model: str = "stub",
        faults: Mapping[str, Fault] | None = None,
        api_key: str | None = None,
        token_delay_s: float = 0.0,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self.engine = engine or StubEngine()
        self.engine_core = StubCore(self.engine)
        self._middleware = middleware
        self.group = StubGroup(self.engine)
        self.peers = StubPeers(self.engine)
        self.adapters = StubAdapters(served_model)
        self.copies = StubCopies(self.engine)
        self.gate = TokenGate()
        self.unwritable, self.writes = "", asyncio.Event()
        self.writes.set()
        self.served_model = served_model
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self._api_key = api_key
        self._answered: list[tuple[float, int]] = []  # seconds and tokens of each completion
        self._token_delay_s = token_delay_s
        layer = FaultLayer(self._app(), faults or {})
        self._answers, self.asgi = layer.answers, layer

    def _app(self) -> Starlette:
        since = self.engine.since
        get = [
            ("/health", self._health),
            ("/version", self._version),
            ("/v1/models", self._models),
            ("/metrics", self._metrics),
            ("/metrics/", self._selected_metrics),
            ("/server_info", self._server_info),
            ("/get_world_size", self._world_size),
            ("/is_paused", self._is_paused),
            ("/is_sleeping", self._is_sleeping),
            ("/stub/state", self._state),
        ]
        post = [
            ("/pause", self._pause),
            ("/resume", self._resume),
            ("/sleep", self._sleep),
            ("/wake_up", self._wake),
            ("/reset_prefix_cache", self._reset_prefix_cache),
            ("/reset_encoder_cache", self._reset_encoder_cache),
            ("/collective_rpc", self._collective_rpc),
            ("/init_weight_transfer_engine", self._init_transfer),
            ("/start_weight_update", self._start_update),
            ("/update_weights", self._update_weights),
            ("/finish_weight_update", self._finish_update),
            ("/v1/load_lora_adapter", self._load_adapter),
            ("/v1/unload_lora_adapter", self._unload_adapter),
            ("/v1/completions", self._counted_completions),
            ("/v1/chat/completions", self._counted_completions),
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            ("/stub/faults", self._set_faults),
        ]
        if since >= (0, 27):
            get.append(("/weight_info", self._weight_info))
            post.append(("/update_weight_version", self._update_weight_version))
        if since >= (0, 32):
            post.append(("/weight_checker", self._weight_checker))
        routes = [Route(path, _guarded(handler), methods=["GET"]) for path, handler in get]
        routes += [Route(path, _guarded(handler), methods=["POST"]) for path, handler in post]
        app = Starlette(routes=routes, middleware=self._middleware)
        app.state.engine_client = self
        return app

    async def _health(self, _: Request) -> Response:
        return Response(status_code=503 if self.engine.dead else 200)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": self.engine.version})

    async def _models(self, request: Request) -> Response:
        if refusal := self._unauthorized(request):
            return refusal
        model = {"id": self.served_model, "root": self.engine.model, "parent": None}
        return JSONResponse({"object": "list", "data": [model, *self.adapters.cards()]})

    async def _load_adapter(self, request: Request) -> Response:
        return await self._change_adapter(request, self.adapters.load)

    async def _unload_adapter(self, request: Request) -> Response:
        return await self._change_adapter(request, self.adapters.unload)

    async def _change_adapter(
        self, request: Request, change: Callable[[dict[str, Any]], str]
    ) -> Response:
        if refusal := self._unauthorized(request):
            return refusal
        if not self.adapters.enabled:
            return JSONResponse({"detail": "Not Found"}, 404)
        try:
            return PlainTextResponse(change(await self._body(request)))
        except AdapterRefused as error:
            return _error(error.status, str(error))

    async def _world_size(self, _: Request) -> Response:
        return JSONResponse({"world_size": self.engine.world_size})

    async def _server_info(self, _: Request) -> Response:
        return JSONResponse({"vllm_config": self._config(), "vllm_env": {}, "system_env": {}})

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_config": {"model": self.engine.model, "dtype": "torch.float32"},
            "weight_transfer_config": {"backend": self.engine.transfer_backend},
            **self.engine.settings,
        }
        if self.engine.kv_reader is not None:
            lease = {"kv_lease_duration": self.engine.kv_lease_s}
            connector = {"kv_role": "kv_producer", "kv_connector_extra_config": lease}
            config["kv_transfer_config"] = connector
        return config

    async def _metrics(self, _: Request) -> Response:
        engine, level = self.engine, self.engine.sleep_level
        labels = 'engine="0",model_name="stub"'
        return PlainTextResponse(
            f"# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} {float(engine.requests)}\n"
            f"vllm:num_requests_waiting{{{labels}}} {float(engine.queued)}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.0\n"
            f"vllm:prompt_tokens_total{{{labels}}} {float(engine.prompt_tokens)}\n"
            f"vllm:generation_tokens_total{{{labels}}} {float(engine.generation_tokens)}\n"
            f"vllm:prefix_cache_queries_total{{{labels}}} {float(engine.prompt_tokens)}\n"
            f"vllm:prefix_cache_hits_total{{{labels}}} 0.0\n"
            f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {float(level == 0)}\n'
            f'vllm:engine_sleep_state{{{labels},sleep_state="weights_offloaded"}} '
            f"{float(level == 1)}\n"
            f'vllm:engine_sleep_state{{{labels},sleep_state="discard_all"}} {float(level == 2)}\n'
            f"{self._traffic_page()}"
        )

    def _traffic_page(self) -> str:
        """Its first token comes with its last."""
        lines = [
            f'http_requests_total{{handler="{path}",method="POST",status="{status // 100}xx"}} {n}'
            for (path, status), n in self._answers.items()
        ]
        seconds = [taken_s for taken_s, _ in self._answered]
        lengths = [length for _, length in self._answered]
        for name, bounds, values in (
            ("time_to_first_token_seconds", (0.1, 1.0, 10.0), seconds),
            ("e2e_request_latency_seconds", (0.1, 1.0, 10.0), seconds),
            ("request_generation_tokens", (1.0, 10.0, 100.0), lengths),
        ):
            for bound in (*bounds, float("inf")):
                shown = "+Inf" if bound == float("inf") else bound
                count = sum(value <= bound for value in values)
                lines.append(f'vllm:{name}_bucket{{engine="0",le="{shown}"}} {float(count)}')
            lines.append(f'vllm:{name}_count{{engine="0"}} {float(len(values))}')
        return "".join(f"{line}\n" for line in lines)

    async def _selected_metrics(self, request: Request) -> Response:
        wanted = tuple(request.query_params.getlist("name[]"))
        page = (await self._metrics(request)).body
        lines = [line for line in bytes(page).decode().splitlines() if line.startswith(wanted)]
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    async def _is_paused(self, _: Request) -> Response:
        if self.engine.dead:
            raise EngineRefused("EngineCore encountered an issue.")
        return JSONResponse({"is_paused": self.engine.paused})

    async def _is_sleeping(self, _: Request) -> Response:
        return JSONResponse({"is_sleeping": self.engine.sleeping})

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return _error(400, "Input should be 'abort', 'wait' or 'keep'")
        core, clears = self.engine_core, request.query_params.get("clear_cache") != "false"
        pause = getattr(core, "pause_generation_async", core.pause_scheduler_async)
        await pause(mode=mode, clear_cache=clears)
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: Request) -> Response:
        await self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def _sleep(self, request: Request) -> Response:
        level = int(request.query_params.get("level", "1"))
        if level not in (0, 1, 2):
            return _error(400, "Input should be less than or equal to 2")
        await self.engine.sleep(level, request.query_params.get("mode", "abort"))
        return JSONResponse({"status": "sleeping", "level": level})

    async def _wake(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags")
        awake = await self.engine.wake(tags)
        status = "awake" if awake else "sleeping"
        return JSONResponse({"status": status, "tags": tags or None})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        asked = request.query_params
        external = asked.get("reset_external") == "true"
        requeue = asked.get("reset_running_requests") == "true"
        return JSONResponse({"success": self.engine.reset_kv(external=external, requeue=requeue)})

    async def _reset_encoder_cache(self, _: Request) -> Response:
        self.engine.cached.discard("encoder")
        return Response()

    async def _collective_rpc(self, request: Request) -> Response:
        body = await self._body(request)
        method, workers = body.get("method"), self.engine.world_size
        if method == "reload_weights":
            self.engine.reload(body["kwargs"]["weights_path"])
            return _results([None] * workers)
        if not self.engine.extension:
            raise EngineRefused(f"Call to collective_rpc method failed: {_missing(method)}")
        if method == "skyctl_draft_uses":
            uses = fit.draft_uses(self.engine, body["kwargs"]["tensors"])
            return _results([uses] * workers)
        if method == "skyctl_load_draft":
            self.engine.load_draft(body["kwargs"]["path"])
            return _results([None] * workers)
        if method == "skyctl_weight_digest":
            asked = body["kwargs"].get("rows", [])
            drafts = body["kwargs"].get("draft", False)
            held = self.engine.draft_contents if drafts else self.engine.contents
            answer: dict[str, Any] = {
                "digest": self.engine.draft_digest if drafts else self.engine.digest,
                "arrangement": self.engine.arrangement,
                "not_finite": self.engine.not_finite,
                "rows": answers(held, asked),
            }
            return _results([answer] * workers)
        if method == "skyctl_tensor_parts":
            has = parts(self.engine.contents, body["kwargs"]["tensors"])
            has = [{**part, "reason": part["reason"] or self.unwritable} for part in has]
            return _results([has] * workers)
        if method == "skyctl_write_tensors":
            await self.writes.wait()
            write(self.engine.contents, **body["kwargs"])
            return _results([None] * workers)
        if method in ("skyctl_repack_tied", "skyctl_leave_group", "skyctl_free_cached"):
            self.engine.log.append(method)
            return _results([None] * workers)
        if method == "skyctl_watch_reload":
            return _results([None] * workers)
        if method == "skyctl_started_with":
            return _results([self._config()] * workers)
        if method == "skyctl_update_problem":
            return _results([self.engine.update_problem] * workers)
        if method == "skyctl_fit":
            return _results([fit.answer(self.engine, **body["kwargs"])] * workers)
        if method == "skyctl_adapter_fit":
            answer = {"unapplied": self.engine.unwrapped(body["kwargs"]["names"]), "unread": []}
            return _results([answer] * workers)
        if method.startswith("skyctl_adapter_"):
            answer = self.adapters.rpc(method, body["kwargs"])
            return _results([answer] * workers)
        if method.startswith("skyctl_weights_") and workers == 1:
            return _results([self.copies.rpc(method, body["kwargs"])])
        if method == "skyctl_nccl":
            answer = {"problem": self.engine.nccl_problem, "settings": self.engine.nccl_settings}
            return _results([answer] * workers)
        if method.startswith("skyctl_layout") and workers == 1:
            return _results([await self.peers.call(method, body["kwargs"])])
        raise EngineRefused(f"Worker failed with error '{_missing(method)}'")

    async def _init_transfer(self, request: Request) -> Response:
        await self.group.init((await self._body(request))["init_info"])
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _start_update(self, _: Request) -> Response:
        self.engine.start_update()
        return JSONResponse({"message": "Weight update started"})

    async def _update_weights(self, request: Request) -> Response:
        await self.group.update((await self._body(request))["update_info"])
        return JSONResponse({"message": "Weights updated"})

    async def _finish_update(self, request: Request) -> Response:
        body = await self._body(request)
        self.engine.finish_update(body.get("weight_version"))
        return JSONResponse({"message": "Weight update finished"})

    async def _weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self.engine.weight_version})

    async def _update_weight_version(self, request: Request) -> Response:
        self.engine.weight_version = (await self._body(request))["new_version"]
        return JSONResponse({"success": True, "new_version": self.engine.weight_version})

    async def _weight_checker(self, _: Request) -> Response:
        return JSONResponse({"checksums": {"weights": self.engine.digest}})

    async def _counted_completions(self, request: Request) -> Response:
        began = time.monotonic()
        answer = await self._completions(request)
        self._answers[request.url.path, answer.status_code] += 1
        if answer.status_code == 200:
            length = int((await self._body(request)).get("max_tokens", 16))
            self._answered.append((time.monotonic() - began, length))
        return answer

    async def _completions(self, request: Request) -> Response:
        if refusal := self._unauthorized(request):
            return refusal
        body = await self._body(request)
        adapter = self.adapters.served.get(body.get("model", ""))
        if adapter is None and body.get("model") != self.served_model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        if self.engine.dead:
            raise EngineRefused("EngineCore encountered an issue.")
        prompt, chat = prompt_ids(body), "messages" in body
        tokens = generate(
            self.engine, self.gate, prompt, int(body.get("max_tokens", 16)), self._token_delay_s
        )
        if adapter is not None:
            if body.get("prompt_logprobs") is not None:
                return _error(400, "prompt log-probabilities of a LoRA adapter")
            tokens = self._with_adapter(adapter, body, prompt)
        if self.engine.paused and self.engine.refuses_arrivals:
            if body.get("stream"):
                refusal = {"message": REFUSED_WHILE_PAUSED, "code": 503}
                events = [_event({"error": refusal}), "data: [DONE]\n\n"]
                return PlainTextResponse("".join(events), media_type="text/event-stream")
            return _error(503, REFUSED_WHILE_PAUSED)
        if body.get("stream"):
            return StreamingResponse(_events(tokens, prompt, chat), media_type="text/event-stream")
        made = [token async for token in tokens]
        ids = [token.id for token in made if token.id is not None]
        choice = {
            "index": 0,
            "text": "".join(token.text for token in made),
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "finish_reason": made[-1].finish_reason,
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": choice["text"]}
        if body.get("logprobs"):
            values = [self.engine.logprob] * len(ids)
            choice["logprobs"] = (
                {"content": [{"logprob": v} for v in values]}
                if chat
                else {"token_logprobs": values}
            )
        name = self.served_model if adapter is None else adapter.name
        return JSONResponse({"object": "text_completion", "model": name, "choices": [choice]})

    async def _with_adapter(
        self, adapter: Loaded, body: dict[str, Any], prompt: list[int]
    ) -> AsyncIterator[Token]:
        """Tokens of a request that goes on with the version it began with."""
        self.adapters.running[adapter] += 1
        try:
            async for token in generate(
                self.engine,
                self.gate,
                prompt,
                int(body.get("max_tokens", 16)),
                self._token_delay_s,
                adapter=adapter.digest,
            ):
                yield token
        finally:
            self.adapters.running[adapter] -= 1

    async def _set_faults(self, request: Request) -> Response:
        """Other faults from now on, counted from their first call; the tests' own route. `dies_at`
        names a step of a push point to point, and `copies` the one at which a copy from worker to
        worker goes wrong; `unwritable` says why it cannot write its weights,
        and `holds_writes` lets no call that writes them end."""
        faults = await request.json()
        self.peers.dies_at = faults.pop("dies_at", "")
        self.unwritable = faults.pop("unwritable", "")
        self.copies.fault = faults.pop("copies", "")
        self.writes.clear() if faults.pop("holds_writes", False) else self.writes.set()
        self.asgi.faults = {route: Fault.from_json(fault) for route, fault in faults.items()}
        self.asgi.calls.clear()
        return JSONResponse({})

    async def _state(self, _: Request) -> Response:
        """What tests want to know of a stub in another process; the tests' own route."""
        engine = self.engine
        return JSONResponse(
            {
                "digest": engine.digest,
                "draft_digest": engine.draft_digest,
                "trainer": self.peers.key,
                "places_taken": self.peers.taken,
                "paused": engine.paused,
                "asleep": sorted(engine.asleep),
                "update_open": engine.update_open,
                "half_loaded": engine.half_loaded,
                "weight_version": engine.weight_version,
                "log": engine.log,
                "served": engine.served,
                "adapters": {name: one.name for name, one in self.adapters.served.items()},
                "calls": dict(self.asgi.calls),
                "rank_offset": (engine.init_infos or [{}])[-1].get("rank_offset"),
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        tokens = prompt_ids(await self._body(request))
        return JSONResponse({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})

    async def _detokenize(self, request: Request) -> Response:
        tokens = (await self._body(request))["tokens"]
        return JSONResponse({"prompt": "".join(chr(token) for token in tokens)})

    async def _body(self, request: Request) -> dict[str, Any]:
        raw = await request.body()
        body: dict[str, Any] = json.loads(raw) if raw else {}
        self.bodies.append((request.url.path, body))
        return body

    def _unauthorized(self, request: Request) -> Response | None:
        if self._api_key in (None, request.headers.get("authorization", "")[len("Bearer ") :]):
            return None
        return JSONResponse({"error": "Unauthorized"}, 401)


async def _events(
    tokens: AsyncIterator[Token], prompt: list[int], chat: bool
) -> AsyncIterator[str]:
    """vLLM's server-sent events; the prompt's ids ride on the first."""
    first: dict[str, Any] = {"prompt_token_ids": prompt}
    if chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield _event({"object": "chat.completion.chunk", "choices": [role], **first})
    async for token in tokens:
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": [] if token.id is None else [token.id],
            "finish_reason": token.finish_reason,
        }
        choice |= {"delta": {"content": token.text}} if chat else {"text": token.text, **first}
        yield _event({"choices": [choice]})
        first = {}
    yield "data: [DONE]\n\n"


def _missing(method: Any) -> str:
    return f"Method {method!r} is not implemented."


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _guarded(handler: Handler) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except EngineRefused as error:
            return _error(500, str(error))

    return guarded


def _results(answers: list[Any]) -> Response:
    """What workers answered, as vLLM sends it: all but containers as text."""
    plain = (dict, list, type(None))
    return JSONResponse({"results": [a if isinstance(a, plain) else str(a) for a in answers]})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)
