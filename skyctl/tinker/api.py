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

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skyctl.core.tinker import TinkerSettings
from skyctl.errors import SkyctlError
from skyctl.tinker import records, wire
from skyctl.tinker.bodies import (
    Answer,
    Bodies,
    Handler,
    checkpoint_path,
    page_of,
    readable,
    refusal,
)
from skyctl.tinker.external import ROUTE, ExternalFiles
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.questions import Unanswerable
from skyctl.tinker.records import Missing
from skyctl.tinker.sampling import Sampling
from skyctl.tinker.sampling_routes import SamplingRoutes
from skyctl.tinker.training import Training
from skyctl.tinker.training_process import Worker
from skyctl.tinker.training_routes import TrainingRoutes

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
        training = TrainingRoutes(
            self.settings, self.ledger, self.worker, self.training, self.bodies
        )
        sampling = SamplingRoutes(self.settings, self.ledger, self.sampling, self.bell, self.bodies)
        external = ExternalFiles(self.ledger, self.key)
        handlers: dict[str, Handler] = {
            **training.handlers(),
            **sampling.handlers(),
            "POST client/config": self._client_config,
            "POST client/dynamic_config": self._dynamic_config,
            "POST create_session": self._create_session,
            "POST session_heartbeat": self._heartbeat,
            "POST sessions/{session}/finish": self._finish_session,
            "POST weights_info": self._weights_info,
            "POST telemetry": self._telemetry,
            "POST copy_weights": refusal(COPY),
            "POST sessions/search": refusal(SEARCH),
            "GET get_server_capabilities": self._capabilities,
            "GET sessions": self._sessions,
            "GET sessions/{session}": self._session,
            "GET training_runs": self._runs,
            "GET training_runs/{model}": self._run,
            "GET training_runs/{model}/checkpoints": self._checkpoints,
            "GET checkpoints": self._checkpoints,
            f"POST,DELETE {checkpoint}/publish": self._publish,
            f"PUT {checkpoint}/ttl": self._ttl,
            f"GET {checkpoint}/external_weights_urls": external.urls,
            f"DELETE {checkpoint}": self._delete_checkpoint,
            "GET,POST,PUT,DELETE {anything:path}": refusal(HOSTED, 404),
        }
        routes = [
            Route("/api/v1/healthz", self._healthz),
            Route(f"/api/v1/{ROUTE}", external.download),
        ]
        for name, handle in handlers.items():
            methods, path = name.split(" ")
            guarded = self._guarded(handle)
            routes.append(Route(f"/api/v1/{path}", guarded, methods=methods.split(",")))
        return Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    @property
    def bodies(self) -> Bodies:
        """How bodies are read."""
        return Bodies(self.settings.max_body)

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
                raise HTTPException(400, readable(error)) from error
            except SkyctlError as error:  # the disk is full, or servers keep what was to go
                await asyncio.sleep(1.0)  # the SDK repeats the request at once
                raise HTTPException(503, error.message) from error

        return guarded

    async def _healthz(self, request: Request) -> Response:
        worker = {**self.worker.report(), "models": self.training.open_models}
        return JSONResponse({"status": "ok", "worker": worker})

    async def _client_config(self, request: Request) -> Answer:
        return {"sample_use_retrieve_futures": True, "parallel_fwdbwd_chunks": True}

    async def _dynamic_config(self, request: Request) -> Answer:
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, request: Request) -> Answer:
        await self.bodies.raw(request)
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
        body = await self.bodies.parsed(request, wire.CreateSession)
        session, now = secrets.token_hex(8), time.time()
        tags, metadata = json.dumps(body.tags), json.dumps(body.user_metadata)
        columns = "id, created, seen, tags, metadata, display_name, project"
        sql = f"INSERT INTO sessions ({columns}) VALUES (?,?,?,?,?,?,?)"
        named = (body.display_name, body.project_id)
        await self.ledger.write(sql, session, now, now, tags, metadata, *named)
        return {"session_id": session, "type": "create_session"}

    async def _heartbeat(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.InSession)
        updated = await self.ledger.write(
            "UPDATE sessions SET seen = ? WHERE id = ?", time.time(), body.session_id
        )
        if not updated:
            raise HTTPException(410, f"there is no session {body.session_id}")
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.FinishSession)
        await self.ledger.write(
            "UPDATE sessions SET finished = ? WHERE id = ?",
            json.dumps({"reason": body.reason, "detail": body.detail}),
            request.path_params["session"],
        )
        return {}

    async def _sessions(self, request: Request) -> Answer:
        offset, limit = page_of(request)
        rows = await self.ledger.rows(
            "SELECT id FROM sessions ORDER BY created DESC LIMIT ? OFFSET ?", limit, offset
        )
        return {"sessions": [row["id"] for row in rows]}

    async def _session(self, request: Request) -> Answer:
        session = request.path_params["session"]
        return await self.ledger.run(lambda c: records.session(c, session))

    async def _runs(self, request: Request) -> Answer:
        offset, limit = page_of(request)
        return await self.ledger.run(lambda c: records.runs(c, limit, offset))

    async def _run(self, request: Request) -> Answer:
        model = request.path_params["model"]
        return await self.ledger.run(lambda c: records.run(c, records.model(c, model)))

    async def _checkpoints(self, request: Request) -> Answer:
        model = request.path_params.get("model")
        offset, limit = page_of(request)
        return await self.ledger.run(lambda c: records.checkpoints(c, model, limit, offset))

    async def _weights_info(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.TinkerPath)
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
        body = await self.bodies.parsed(request, wire.SetTtl)
        expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        await self._set_checkpoint(request, "expires", expires)

    async def _set_checkpoint(self, request: Request, column: str, value: float | None) -> None:
        path = checkpoint_path(request)

        def commit(connection: sqlite3.Connection) -> None:
            records.checkpoint(connection, path)
            connection.execute(f"UPDATE checkpoints SET {column} = ? WHERE path = ?", (value, path))

        await self.ledger.run(commit)

    async def _delete_checkpoint(self, request: Request) -> None:
        path = checkpoint_path(request)
        row = await self.ledger.run(lambda c: records.checkpoint(c, path))
        await self.sampling.delete(row)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)
