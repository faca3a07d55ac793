"""The SDK's routes of training: requests are checked, put on disk, and carried out in order."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from skyctl.core.tinker import TinkerSettings
from skyctl.tinker import records, requests, wire
from skyctl.tinker.bodies import (
    Answer,
    Bodies,
    Handler,
    readable,
)
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.offers import check_base, check_optimizer, check_rank
from skyctl.tinker.records import Missing
from skyctl.tinker.training import Training
from skyctl.tinker.training_process import Worker


@dataclass(frozen=True)
class TrainingRoutes:
    """Routes that create, train, save and load models."""

    settings: TinkerSettings
    """What the API offers."""
    ledger: Ledger
    """The database of sessions, models, requests and checkpoints."""
    worker: Worker
    """The training process."""
    training: Training
    """The scheduler of training requests."""
    bodies: Bodies
    """How bodies are read."""

    def handlers(self) -> dict[str, Handler]:
        """By method and path below /api/v1."""
        return {
            "POST create_model": self._create_model,
            "POST get_info": self._get_info,
            "POST forward_backward": self._forward_backward,
            "POST optim_step": self._in_order(self._optim_step, requests.OPTIM_STEP),
            "POST save_weights": self._in_order(self._save_weights, requests.SAVE),
            "POST save_weights_for_sampler": self._in_order(
                self._save_for_sampler, requests.SAVE_SAMPLER
            ),
            "POST load_weights": self._in_order(self._load_weights, requests.LOAD),
            "POST save_weights_external": self._in_order(
                self._save_external, requests.SAVE_EXTERNAL
            ),
        }

    def _in_order(self, handle: Handler, kind: str) -> Handler:
        """A refused request still has its seq_id: a 4xx would leave a gap, for which every later
        request of the model would wait. So it is accepted, and fails in its turn.
        """

        async def in_order(request: Request) -> Answer:
            body = await self.bodies.raw(request)
            request.scope["skyctl.body"] = body
            try:
                return await handle(request)
            except (Missing, ValueError) as error:
                try:
                    place = wire.Place.model_validate_json(body)
                except ValidationError:
                    raise error from None
                refused = {"refused": readable(error)}
                return await self._of_model(place.model_id, place.seq_id, kind, refused)

        return in_order

    async def _create_model(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.CreateModel)
        check_base(self.settings, body.base_model)
        check_optimizer(body.optimizer_config)
        lora = (body.lora_config or wire.Lora(rank=0)).model_dump()
        check_rank(self.settings, lora["rank"])
        if lora["seed"] is None:
            lora["seed"] = secrets.randbelow(2**31)
        config = {"base": self.settings.base_model, "lora": lora}
        number, metadata = body.model_seq_id, body.user_metadata
        return await self._new_model(body.session_id, number, requests.CREATE, config, metadata)

    async def _get_info(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.OfModel)
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
        body = await self.bodies.raw(request)
        try:
            message = wire.message("ForwardBackwardRequest").FromString(body)
        except Exception as error:
            raise ValueError(f"the body is not a ForwardBackwardRequest: {error}") from error
        kind = requests.FORWARD if message.forward_only else requests.FORWARD_BACKWARD
        return await self._of_model(message.model_id, message.seq_id, kind, body=body)

    async def _optim_step(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.OptimStep)
        if body.optimizer_params is not None or body.adam_params is None:
            raise ValueError("only AdamW is offered here: give AdamParams")
        extra = {"params": body.adam_params}
        return await self._of_model(body.model_id, body.seq_id, requests.OPTIM_STEP, extra)

    async def _save_weights(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.SaveWeights)
        name = body.path or f"{body.seq_id:06d}"
        extra = {
            "path": f"tinker://{body.model_id}/weights/{name}",
            "overwrite": body.overwrite,
            "ttl_seconds": body.ttl_seconds,
            "metadata": body.user_metadata,
        }
        return await self._of_model(body.model_id, body.seq_id, requests.SAVE, extra)

    async def _save_for_sampler(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.SaveForSampler)
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

    async def _save_external(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.SaveExternal)
        if body.age_encryption_recipients:
            raise ValueError("age_encryption_recipients are not offered here: the files stay here")
        extra = {
            "path": f"tinker://{body.model_id}/external_weights/{body.path}",
            "ttl_seconds": body.ttl_seconds,
        }
        return await self._of_model(body.model_id, body.seq_id, requests.SAVE_EXTERNAL, extra)

    async def _load_weights(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.LoadWeights)
        if body.base_model is not None:
            check_base(self.settings, body.base_model)
        if body.optimizer_config is not None:
            check_optimizer(body.optimizer_config)
        checkpoint = await self.ledger.run(lambda c: records.checkpoint(c, body.path))
        config = json.loads(checkpoint["config"])
        check_base(self.settings, config["base"])
        check_rank(self.settings, config["lora"]["rank"])
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
            row = records.running(connection, model)
            if records.is_accepted(connection, model, seq, kind):
                return False
            if seq <= row["done_seq"]:
                raise ValueError(f"seq_id {seq} comes too late: {row['done_seq']} is done")
            records.add_request(connection, model, seq, kind, extra, body)
            return True

        return await self._accept(model, seq, commit, len(body or b""))

    async def _accept(
        self,
        model: str,
        seq: int,
        commit: Callable[[sqlite3.Connection], bool],
        pass_bytes: int = 0,
    ) -> Answer:
        if await self.ledger.run(commit):
            self.training.accepted(model, seq, pass_bytes)
        return {"request_id": records.request_id(model, seq), "model_id": model}
