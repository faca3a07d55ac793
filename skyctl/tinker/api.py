"""The SDK's routes below /api/v1: requests are checked, put on disk, and answered.

Protocol: the tinker SDK 0.38.0. A request that fails later is a 200 with `error` and `category`; a
4xx with `detail` is what can be refused at once. 409 is never sent: the SDK repeats it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skyctl.core.tinker import TinkerSettings
from skyctl.errors import SkyctlError
from skyctl.tinker import records, requests, wire
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.records import Missing
from skyctl.tinker.sampling import SAMPLE, Sampling, Unanswerable, question
from skyctl.tinker.training import Training
from skyctl.tinker.training_process import Worker

POLL_S = 25.0
"""Shorter than the SDK's deadline of 45 s."""
MOST_SAMPLES = 20_000

B = TypeVar("B", bound=BaseModel)
Answer = Response | dict[str, Any] | None
"""A dictionary is sent as JSON, None as 204."""
Handler = Callable[[Request], Awaitable[Answer]]

EXTERNAL = (
    "save_weights_external is not offered here: save_weights_for_sampler writes PEFT directories"
)
HOSTED = "not offered here: only the hosted service has this route"
COPY = (
    "copying checkpoints is not offered here: load one with create_training_client_from_state, "
    "and save it"
)
SEARCH = "searching sessions is not offered here: list_sessions lists them"


@dataclass(frozen=True)
class Api:
    """The routes of one API process."""

    settings: TinkerSettings
    """`base_model` is the model's name in the API, by which SDKs also find a tokenizer; `max_body`
    bounds a body in bytes as received, and four times that once unpacked."""
    key: str = field(repr=False)
    """The API key that every request must carry."""
    ledger: Ledger
    """The database of sessions, models, requests and checkpoints."""
    worker: Worker
    """The training process."""
    training: Training
    """The scheduler of training requests."""
    sampling: Sampling
    """The samples under way."""
    bell: Doorbell
    """Wakes the long polls of a request that is done."""
    context: int
    """The number of tokens that a server takes."""

    def app(self) -> Starlette:
        """The ASGI application."""
        checkpoint = "training_runs/{model}/checkpoints/{checkpoint:path}"
        handlers: dict[str, Handler] = {
            "POST client/config": self._client_config,
            "POST client/dynamic_config": self._dynamic_config,
            "POST create_session": self._create_session,
            "POST session_heartbeat": self._heartbeat,
            "POST sessions/{session}/finish": self._finish_session,
            "POST create_model": self._create_model,
            "POST get_info": self._get_info,
            "POST forward_backward": self._forward_backward,
            "POST optim_step": self._in_order(self._optim_step, requests.OPTIM_STEP),
            "POST save_weights": self._in_order(self._save_weights, requests.SAVE),
            "POST save_weights_for_sampler": self._in_order(
                self._save_for_sampler, requests.SAVE_SAMPLER
            ),
            "POST load_weights": self._in_order(self._load_weights, requests.LOAD),
            "POST save_weights_external": self._in_order(_refusal(EXTERNAL), requests.SAVE),
            "POST create_sampling_session": self._create_sampler,
            "POST join_sampling_session": self._join_sampler,
            "POST asample": self._sample,
            "POST retrieve_future": self._retrieve,
            "POST retrieve_futures": self._retrieve_many,
            "POST cancel_future": self._cancel,
            "POST weights_info": self._weights_info,
            "POST telemetry": self._telemetry,
            "POST copy_weights": _refusal(COPY),
            "POST sessions/search": _refusal(SEARCH),
            "GET get_server_capabilities": self._capabilities,
            "GET sessions": self._sessions,
            "GET sessions/{session}": self._session,
            "GET samplers/{sampler:path}": self._get_sampler,
            "GET training_runs": self._runs,
            "GET training_runs/{model}": self._run,
            "GET training_runs/{model}/checkpoints": self._checkpoints,
            "GET checkpoints": self._checkpoints,
            f"POST,DELETE {checkpoint}/publish": self._publish,
            f"PUT {checkpoint}/ttl": self._ttl,
            f"DELETE {checkpoint}": self._delete_checkpoint,
            "GET,POST,PUT,DELETE {anything:path}": _refusal(HOSTED, 404),
        }
        routes = [Route("/api/v1/healthz", _healthz)]
        for name, handle in handlers.items():
            methods, path = name.split(" ")
            guarded = self._guarded(handle)
            routes.append(Route(f"/api/v1/{path}", guarded, methods=methods.split(",")))
        return Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def _guarded(self, handle: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            key = request.headers.get("x-api-key", "")
            if not hmac.compare_digest(key.encode(), self.key.encode()):
                raise HTTPException(401, "the API key is wrong; `skyctl urls --format tinker`")
            try:
                answer = await handle(request)
                if isinstance(answer, Response):
                    return answer
                return Response(status_code=204) if answer is None else JSONResponse(answer)
            except Missing as error:
                raise HTTPException(404, str(error)) from error
            except (Unanswerable, ValueError, OverflowError) as error:
                raise HTTPException(400, _readable(error)) from error
            except SkyctlError as error:  # the disk is full, or servers keep what was to go
                await asyncio.sleep(1.0)  # the SDK repeats the request at once
                raise HTTPException(503, error.message) from error

        return guarded

    def _in_order(self, handle: Handler, kind: str) -> Handler:
        """A refused request still has its seq_id: a 4xx would leave a gap, for which every later
        request of the model would wait. So it is accepted, and fails in its turn.
        """

        async def in_order(request: Request) -> Answer:
            body = await self._body(request)
            request.scope["skyctl.body"] = body
            try:
                return await handle(request)
            except (Missing, ValueError) as error:
                try:
                    place = wire.Place.model_validate_json(body)
                except ValidationError:
                    raise error from None
                refused = {"refused": _readable(error)}
                return await self._of_model(place.model_id, place.seq_id, kind, refused)

        return in_order

    # --- sessions ------------------------------------------------------------------------------

    async def _client_config(self, request: Request) -> Answer:
        return {"sample_use_retrieve_futures": True, "parallel_fwdbwd_chunks": True}

    async def _dynamic_config(self, request: Request) -> Answer:
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, request: Request) -> Answer:
        await self._body(request)
        return {"status": "accepted"}

    async def _capabilities(self, request: Request) -> Answer:
        model = {
            "model_name": self.settings.base_model,
            "max_context_length": self.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def _create_session(self, request: Request) -> Answer:
        body = await self._json(request, wire.CreateSession)
        session, now = secrets.token_hex(8), time.time()
        tags, metadata = json.dumps(body.tags), json.dumps(body.user_metadata)
        columns = "id, created, seen, tags, metadata, display_name, project"
        sql = f"INSERT INTO sessions ({columns}) VALUES (?,?,?,?,?,?,?)"
        named = (body.display_name, body.project_id)
        await self.ledger.write(sql, session, now, now, tags, metadata, *named)
        return {"session_id": session, "type": "create_session"}

    async def _heartbeat(self, request: Request) -> Answer:
        body = await self._json(request, wire.InSession)
        updated = await self.ledger.write(
            "UPDATE sessions SET seen = ? WHERE id = ?", time.time(), body.session_id
        )
        if not updated:
            raise HTTPException(410, f"there is no session {body.session_id}")
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: Request) -> Answer:
        body = await self._json(request, wire.FinishSession)
        await self.ledger.write(
            "UPDATE sessions SET finished = ? WHERE id = ?",
            json.dumps({"reason": body.reason, "detail": body.detail}),
            request.path_params["session"],
        )
        return {}

    async def _sessions(self, request: Request) -> Answer:
        offset, limit = _page(request)
        rows = await self.ledger.rows(
            "SELECT id FROM sessions ORDER BY created DESC LIMIT ? OFFSET ?", limit, offset
        )
        return {"sessions": [row["id"] for row in rows]}

    async def _session(self, request: Request) -> Answer:
        session = request.path_params["session"]
        return await self.ledger.run(lambda c: records.session(c, session))

    # --- training ------------------------------------------------------------------------------

    async def _create_model(self, request: Request) -> Answer:
        body = await self._json(request, wire.CreateModel)
        self._check_base(body.base_model)
        self._check_optimizer(body.optimizer_config)
        lora = (body.lora_config or wire.Lora(rank=0)).model_dump()
        self._check_rank(lora["rank"])
        if lora["seed"] is None:
            lora["seed"] = secrets.randbelow(2**31)
        config = {"base": self.settings.base_model, "lora": lora}
        number, metadata = body.model_seq_id, body.user_metadata
        return await self._new_model(body.session_id, number, requests.CREATE, config, metadata)

    async def _get_info(self, request: Request) -> Answer:
        body = await self._json(request, wire.OfModel)
        row = await self.ledger.run(lambda c: records.model(c, body.model_id))
        config = json.loads(row["config"])
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_name": config["base"],
            "model_data": {
                "arch": self.worker.hello.get("architecture"),
                "model_name": config["base"],
                "tokenizer_id": config["base"],
            },
            **records.rank(config),
            "optimizer_config": {"type": "adamw"},
        }

    async def _forward_backward(self, request: Request) -> Answer:
        body = await self._body(request)
        try:
            message = wire.message("ForwardBackwardRequest").FromString(body)
        except Exception as error:
            raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from error
        kind = requests.FORWARD if message.forward_only else requests.FORWARD_BACKWARD
        return await self._of_model(message.model_id, message.seq_id, kind, body=body)

    async def _optim_step(self, request: Request) -> Answer:
        body = await self._json(request, wire.OptimStep)
        if body.optimizer_params is not None or body.adam_params is None:
            raise ValueError("only AdamW is offered here: give AdamParams")
        extra = {"params": body.adam_params}
        return await self._of_model(body.model_id, body.seq_id, requests.OPTIM_STEP, extra)

    async def _save_weights(self, request: Request) -> Answer:
        body = await self._json(request, wire.SaveWeights)
        name = body.path or f"{body.seq_id:06d}"
        extra = {
            "path": f"tinker://{body.model_id}/weights/{name}",
            "overwrite": body.overwrite,
            "ttl_seconds": body.ttl_seconds,
            "metadata": body.user_metadata,
        }
        return await self._of_model(body.model_id, body.seq_id, requests.SAVE, extra)

    async def _save_for_sampler(self, request: Request) -> Answer:
        body = await self._json(request, wire.SaveForSampler)
        name = body.path or f"{body.seq_id:06d}.unnamed"
        extra: dict[str, Any] = {
            "path": f"tinker://{body.model_id}/sampler_weights/{name}",
            "ttl_seconds": body.ttl_seconds,
            "metadata": body.user_metadata,
        }
        if body.path is None:
            if body.sampling_session_seq_id is None:
                raise ValueError("give a path or a sampling_session_seq_id")
            session = body.model_id.split(":", 1)[0]
            extra["sampler"] = f"{session}:sample:{body.sampling_session_seq_id}"
            extra |= {"session": session, "inflight": body.kind == "inflight"}
        return await self._of_model(body.model_id, body.seq_id, requests.SAVE_SAMPLER, extra)

    async def _load_weights(self, request: Request) -> Answer:
        body = await self._json(request, wire.LoadWeights)
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.optimizer_config is not None:
            self._check_optimizer(body.optimizer_config)
        checkpoint = await self.ledger.run(lambda c: records.checkpoint(c, body.path))
        config = json.loads(checkpoint["config"])
        self._check_base(config["base"])
        self._check_rank(config["lora"]["rank"])
        if body.optimizer and not checkpoint["optimizer"]:
            raise ValueError(f"{body.path} has no optimizer state: it was saved for a sampler")
        extra = {"path": body.path, "optimizer": body.optimizer}
        if body.model_id is not None and body.seq_id is not None:
            row = await self.ledger.run(lambda c: records.model(c, body.model_id or ""))
            if (rank := json.loads(row["config"])["lora"]["rank"]) != config["lora"]["rank"]:
                raise ValueError(
                    f"{body.path} has rank {config['lora']['rank']}, the model rank {rank}"
                )
            return await self._of_model(body.model_id, body.seq_id, requests.LOAD, extra)
        session, number, metadata = body.session_id, body.model_seq_id, body.user_metadata
        if session is None or number is None:
            raise ValueError("give model_id and seq_id, or session_id and model_seq_id")
        return await self._new_model(session, number, requests.LOAD, config, metadata, extra)

    async def _new_model(
        self,
        session: str,
        number: int,
        kind: str,
        config: dict[str, Any],
        metadata: wire.Metadata,
        extra: dict[str, Any] | None = None,
    ) -> Answer:
        """Accept a model, and the request that creates it."""
        model = f"{session}:train:{number}"

        def commit(connection: sqlite3.Connection) -> bool:
            records.session(connection, session)
            if records.is_accepted(connection, model, 0, kind):
                return False
            records.add_model(connection, model, session, config, metadata)
            records.add_request(connection, model, 0, kind, extra)
            return True

        return await self._accept(model, 0, commit)

    async def _of_model(
        self,
        model: str,
        seq: int,
        kind: str,
        extra: dict[str, Any] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Accept a request of an existing model."""
        if not 1 <= seq <= 2**62:
            raise ValueError(f"seq_id {seq} is not valid: they begin at 1")

        def commit(connection: sqlite3.Connection) -> bool:
            row = records.model(connection, model)
            if records.is_accepted(connection, model, seq, kind):
                return False
            if seq <= row["done_seq"]:
                raise ValueError(f"seq_id {seq} comes too late: {row['done_seq']} is done")
            records.add_request(connection, model, seq, kind, extra, body)
            return True

        return await self._accept(model, seq, commit)

    async def _accept(
        self, model: str, seq: int, commit: Callable[[sqlite3.Connection], bool]
    ) -> Answer:
        if await self.ledger.run(commit):
            self.training.accepted(model, seq)
        return {"request_id": records.request_id(model, seq), "model_id": model}

    # --- sampling ------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request) -> Answer:
        body = await self._json(request, wire.CreateSampler)
        if body.model_path is None:
            if body.base_model is None:
                raise ValueError("give a base_model or a model_path")
            self._check_base(body.base_model)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"

        def commit(connection: sqlite3.Connection) -> None:
            records.session(connection, body.session_id)
            if body.model_path is not None:
                checkpoint = records.checkpoint(connection, body.model_path)
                config = json.loads(checkpoint["config"])
                self._check_base(config["base"])
                if not config["lora"]["rank"]:
                    self._check_rank(0)
            now = time.time()
            connection.execute(
                "INSERT OR IGNORE INTO samplers (id, session, path, created, used) "
                "VALUES (?,?,?,?,?)",
                (sampler, body.session_id, body.model_path, now, now),
            )

        await self.ledger.run(commit)
        return {"sampling_session_id": sampler, "type": "create_sampling_session"}

    async def _join_sampler(self, request: Request) -> Answer:
        body = await self._json(request, wire.JoinSampler)

        def commit(connection: sqlite3.Connection) -> int:
            session = records.sampler(connection, body.sampling_session_id)["session"]
            connection.execute("UPDATE sessions SET clones = clones + 1 WHERE id = ?", (session,))
            sql = "SELECT clones FROM sessions WHERE id = ?"
            return int(connection.execute(sql, (session,)).fetchone()[0])

        return {"client_counter": await self.ledger.run(commit)}

    async def _get_sampler(self, request: Request) -> Answer:
        sampler = request.path_params["sampler"]
        row = await self.ledger.run(lambda c: records.sampler(c, sampler))
        return {
            "sampler_id": sampler,
            "base_model": self.settings.base_model,
            "model_path": row["path"],
        }

    async def _sample(self, request: Request) -> Answer:
        body = await self._body(request)
        sample = wire.Sample.model_validate_json(body)
        try:
            question(json.loads(body))  # refuse here, once, what is not offered
        except (TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"the body is not a sample request: {error}") from error
        if self.sampling.busy > MOST_SAMPLES:
            raise HTTPException(429, "too many samples are under way")
        sampler, seq = sample.sampling_session_id, sample.seq_id

        def commit(connection: sqlite3.Connection) -> bool:
            records.sampler(connection, sampler)
            if records.is_accepted(connection, sampler, seq, SAMPLE):
                return False
            records.add_request(connection, sampler, seq, SAMPLE, body=body)
            connection.execute("UPDATE samplers SET used = ? WHERE id = ?", (time.time(), sampler))
            return True

        name = records.request_id(sampler, seq)
        if await self.ledger.run(commit):
            self.sampling.accepted(name)
        ids = [f"{name}:{number}" for number in range(sample.num_samples)]
        return {"request_id": name, "sample_sequence_ids": ids}

    # --- futures -------------------------------------------------------------------------------

    async def _retrieve(self, request: Request) -> Answer:
        body = await self._json(request, wire.Future)
        with self.bell.listen(body.request_id) as waiter:
            row = await self._future(body.request_id)
            if row["state"] == "accepted":
                await waiter.notified(POLL_S)
                row = await self._future(body.request_id)
        if row["state"] == "accepted":
            return {"type": "try_again", "request_id": row["id"], "queue_state": "active"}
        if row["state"] == "gone":
            raise HTTPException(410, "the result was fetched, or its time is over")
        if row["state"] == "failed":
            return {"error": row["result"].decode(), "category": row["category"]}
        return Response(row["result"], media_type=row["type"])

    async def _future(self, name: str) -> sqlite3.Row:
        row = await self.ledger.row(
            "SELECT id, state, result, type, category FROM requests WHERE id = ?", name
        )
        if row is None:
            raise HTTPException(404, f"there is no request {name}")
        return row

    async def _retrieve_many(self, request: Request) -> Answer:
        body = await self._json(request, wire.Futures)
        sampler, clone = body.target.sampling_session_id, body.target.cloned_sampler_id
        timeout_s = min(POLL_S if body.timeout is None else body.timeout, POLL_S)
        if body.retrieved_request_ids:
            await self.ledger.run(
                lambda c: records.forget_results(c, sampler, body.retrieved_request_ids)
            )
        await self.ledger.run(lambda c: records.sampler(c, sampler))
        deadline = time.monotonic() + timeout_s
        with self.bell.listen(sampler) as waiter:
            while True:
                rows = await self.ledger.run(
                    lambda c: records.finished(c, sampler, clone, body.prev_cursor)
                )
                remaining_s = deadline - time.monotonic()
                if rows or remaining_s <= 0 or not await waiter.notified(remaining_s):
                    break
        completions = [
            {"state": "failed", "request_id": row["id"]}
            if row["state"] == "failed"
            else {
                "state": "finished",
                "request_id": row["id"],
                "response_payload_uncompressed_size": row["size"],
            }
            for row in rows
        ]
        cursor = rows[-1]["done_order"] if rows else body.prev_cursor
        return {"completions": completions, "cursor": cursor}

    async def _cancel(self, request: Request) -> Answer:
        body = await self._json(request, wire.Cancel)
        for name in body.request_ids or [body.request_id or ""]:
            self.sampling.cancel(name)
        return {}

    # --- runs and checkpoints ------------------------------------------------------------------

    async def _runs(self, request: Request) -> Answer:
        offset, limit = _page(request)
        return await self.ledger.run(lambda c: records.runs(c, limit, offset))

    async def _run(self, request: Request) -> Answer:
        model = request.path_params["model"]
        return await self.ledger.run(lambda c: records.run(c, records.model(c, model)))

    async def _checkpoints(self, request: Request) -> Answer:
        model = request.path_params.get("model")
        offset, limit = _page(request)
        return await self.ledger.run(lambda c: records.checkpoints(c, model, limit, offset))

    async def _weights_info(self, request: Request) -> Answer:
        body = await self._json(request, wire.TinkerPath)
        row = await self.ledger.run(lambda c: records.checkpoint(c, body.tinker_path))
        config = json.loads(row["config"])
        lora = config["lora"]
        return {
            "base_model": config["base"],
            **records.rank(config),
            "optimizer_config": {"type": "adamw"},
            **{name: lora[name] for name in ("train_unembed", "train_mlp", "train_attn")},
        }

    async def _publish(self, request: Request) -> None:
        await self._set_checkpoint(request, "public", int(request.method == "POST"))

    async def _ttl(self, request: Request) -> None:
        body = await self._json(request, wire.SetTtl)
        expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        await self._set_checkpoint(request, "expires", expires)

    async def _set_checkpoint(self, request: Request, column: str, value: float | None) -> None:
        path = _checkpoint_path(request)

        def commit(connection: sqlite3.Connection) -> None:
            records.checkpoint(connection, path)
            connection.execute(f"UPDATE checkpoints SET {column} = ? WHERE path = ?", (value, path))

        await self.ledger.run(commit)

    async def _delete_checkpoint(self, request: Request) -> None:
        path = _checkpoint_path(request)
        row = await self.ledger.run(lambda c: records.checkpoint(c, path))
        await self.sampling.delete(row)

    # --- bodies --------------------------------------------------------------------------------

    async def _json(self, request: Request, kind: type[B]) -> B:
        return kind.model_validate_json(await self._body(request) or b"{}")

    async def _body(self, request: Request) -> bytes:
        """The body, unpacked; bounded before and after."""
        if (unpacked := request.scope.get("skyctl.body")) is not None:
            return bytes(unpacked)
        limit, parts, size = self.settings.max_body, [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            parts.append(part)
        body = b"".join(parts)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return body
        if encoding != "zstd":
            raise HTTPException(415, f"content-encoding {encoding} is not offered: zstd is")
        try:
            return await asyncio.to_thread(wire.unpack_zstd, body, 4 * limit)
        except wire.TooLarge as error:
            raise HTTPException(413, str(error)) from error

    def _check_base(self, name: str) -> None:
        if name != self.settings.base_model:
            raise Missing(
                f"base model {name} is not served here; this is: {self.settings.base_model}"
            )

    def _check_rank(self, rank: int) -> None:
        if rank == 0 and not self.settings.full_parameters:
            raise ValueError(
                "rank 0 trains all parameters, which is not offered here "
                "(`tinker: full_parameters` in the fleet file)"
            )
        if not 0 <= rank <= self.settings.max_rank:
            raise ValueError(
                f"rank {rank} is not offered here: 1 to {self.settings.max_rank} "
                "(`tinker: max_rank` in the fleet file)"
            )

    def _check_optimizer(self, optimizer: wire.Optimizer) -> None:
        if optimizer.type != "adamw":
            raise ValueError(f"optimizer {optimizer.type} is not offered here: adamw is")


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _refusal(text: str, status: int = 400) -> Handler:
    async def refuse(request: Request) -> Answer:
        if status == 400:
            raise ValueError(text)
        raise HTTPException(status, text)

    return refuse


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)


def _readable(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in error.errors()[:3]
    )


def _page(request: Request) -> tuple[int, int]:
    """Offset and limit of a list; the SDK's default limit is 20 or 100."""
    offset = int(request.query_params.get("offset", 0))
    limit = int(request.query_params.get("limit", 100))
    if offset < 0 or not 1 <= limit <= 10_000:
        raise ValueError("offset must be 0 or more, limit from 1 to 10000")
    return offset, limit


def _checkpoint_path(request: Request) -> str:
    return f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"
