"""The SDK's routes of sampling, and of the futures of all requests."""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from skyctl.core.tinker import TinkerSettings
from skyctl.tinker import records, wire
from skyctl.tinker.bodies import (
    Answer,
    Bodies,
    Handler,
)
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.offers import check_base, check_rank
from skyctl.tinker.questions import question
from skyctl.tinker.requests import Outcome
from skyctl.tinker.sampling import SAMPLE, Sampling

POLL_S = 25.0
"""Shorter than the SDK's deadline of 45 s."""
MOST_SAMPLES = 20_000


@dataclass(frozen=True)
class SamplingRoutes:
    """Routes that sample from weights, and that return results."""

    settings: TinkerSettings
    """What the API offers."""
    ledger: Ledger
    """The database of sessions, models, requests and checkpoints."""
    sampling: Sampling
    """The samples under way."""
    bell: Doorbell
    """Wakes the long polls of a request that is done."""
    bodies: Bodies
    """How bodies are read."""

    def handlers(self) -> dict[str, Handler]:
        """By method and path below /api/v1."""
        return {
            "POST create_sampling_session": self._create_sampler,
            "POST join_sampling_session": self._join_sampler,
            "POST asample": self._sample,
            "POST retrieve_future": self._retrieve,
            "POST retrieve_futures": self._retrieve_many,
            "POST cancel_future": self._cancel,
            "GET samplers/{sampler:path}": self._get_sampler,
        }

    async def _create_sampler(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.CreateSampler)
        if body.model_path is None:
            if body.base_model is None:
                raise ValueError("give a base_model or a model_path")
            check_base(self.settings, body.base_model)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"

        def commit(connection: sqlite3.Connection) -> None:
            records.session(connection, body.session_id)
            if body.model_path is not None:
                checkpoint = records.checkpoint(connection, body.model_path)
                config = json.loads(checkpoint["config"])
                check_base(self.settings, config["base"])
                if not config["lora"]["rank"]:
                    check_rank(self.settings, 0)
            now = time.time()
            connection.execute(
                "INSERT OR IGNORE INTO samplers (id, session, path, created, used) "
                "VALUES (?,?,?,?,?)",
                (sampler, body.session_id, body.model_path, now, now),
            )

        await self.ledger.run(commit)
        return {"sampling_session_id": sampler, "type": "create_sampling_session"}

    async def _join_sampler(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.JoinSampler)

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
        body = await self.bodies.raw(request)
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

    async def _retrieve(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.Future)
        name = body.request_id
        with self.bell.listen(name) as waiter:
            outcome = None if self.bell.expects(name) else await self._outcome(name)
            if outcome is None:
                await waiter.notified(POLL_S)
                outcome = waiter.outcome or await self._outcome(name)
        if outcome is None:
            return {"type": "try_again", "request_id": name, "queue_state": "active"}
        if outcome.category:
            return {"error": outcome.result.decode(), "category": outcome.category}
        return Response(outcome.result, media_type=outcome.type)

    async def _outcome(self, name: str) -> Outcome | None:
        """What is on record, None while the request waits."""
        sql = "SELECT state, result, type, category FROM requests WHERE id = ?"
        row = await self.ledger.row(sql, name)
        if row is None:
            raise HTTPException(404, f"there is no request {name}")
        if row["state"] == "gone":
            raise HTTPException(410, "the result was fetched, or its time is over")
        if row["state"] == "accepted":
            return None
        return Outcome(row["result"], row["type"], row["category"])

    async def _retrieve_many(self, request: Request) -> Answer:
        body = await self.bodies.parsed(request, wire.Futures)
        sampler, clone = body.target.sampling_session_id, body.target.cloned_sampler_id
        timeout_s = min(POLL_S if body.timeout is None else body.timeout, POLL_S)

        def received(connection: sqlite3.Connection) -> None:
            records.sampler(connection, sampler)  # a model's results are not fetched here
            records.forget_results(connection, sampler, body.retrieved_request_ids)

        await self.ledger.run(received)
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
        body = await self.bodies.parsed(request, wire.Cancel)
        for name in body.request_ids or [body.request_id or ""]:
            self.sampling.cancel(name)
        return {}
