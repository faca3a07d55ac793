"""Carries out samples on the fleet's servers, each with the adapter of its sampler.

vLLM 0.32 cannot return prompt logprobs with adapters loaded: the training worker computes them. A
sample that was unfinished when the process died is generated again.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import shutil
import sqlite3
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from skyctl.errors import SkyctlError
from skyctl.tinker import wire
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.questions import (
    Question,
    Unanswerable,
    completion_body,
    question,
    sample_response,
)
from skyctl.tinker.requests import Outcome, record_outcome
from skyctl.tinker.training_process import Refused, Worker, WorkerDied
from skyctl.tinker.weights import label_of

_LOG = logging.getLogger(__name__)
SAMPLE = "sample"
COMPLETIONS = "/v1/completions"


_ATTEMPTS = 5
"""How often a sample is asked for whose adapter is unloaded each time."""


class AdapterGone(SkyctlError):
    """Something else has unloaded the adapter that a request was for."""


class Servers(Protocol):
    """The fleet's servers, as sampling needs them."""

    base: str
    """The model name of requests to the base model."""
    context: int

    async def complete(
        self, body: Mapping[str, Any], weights: str | None, session: str
    ) -> dict[str, Any]:
        """The answer to a /v1/completions body, by servers whose own weights are those in this
        directory; None: those that the fleet was given. A router with a sticky policy sends a
        session to the same server again.

        Raises:
            AdapterGone: `using` loads it again. ServerError: it was refused.
            SkyctlError: the weights cannot be brought there.
        """
        ...

    def using(self, name: str, directory: str) -> AbstractAsyncContextManager[None]:
        """Inside, every server serves this adapter under this name. Raises SkyctlError."""
        ...

    async def unload(self, name: str) -> None:
        """Unload an adapter; an unknown one is not an error. Raises SkyctlError."""
        ...

    def leaving(self, directory: str) -> AbstractAsyncContextManager[None]:
        """Inside, no server has or gets the weights in this directory. Raises SkyctlError if those
        that are on servers cannot be replaced now.
        """
        ...


@dataclass(frozen=True)
class _Weights:
    """What one sampler samples from."""

    directory: str | None = None
    """None: the base."""
    adapter: bool = False
    """Whether an adapter of the base is in it, and no whole model."""


class Sampling:
    """All samplers of one API process."""

    def __init__(
        self,
        ledger: Ledger,
        servers: Servers,
        worker: Worker,
        bell: Doorbell,
        concurrency: int = 256,
    ) -> None:
        self._ledger = ledger
        self._servers = servers
        self._worker = worker
        self._bell = bell
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def busy(self) -> int:
        """The number of samples under way."""
        return len(self._tasks)

    async def load(self) -> None:
        """Resume what an earlier process left."""
        for row in await self._ledger.rows(
            "SELECT id FROM requests WHERE state = 'accepted' AND kind = ?", SAMPLE
        ):
            self.accepted(row["id"])

    def accepted(self, request: str) -> None:
        """A request is on disk: start generating."""
        if request not in self._tasks:
            self._start(request, self._carry_out(request))

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def cancel(self, request: str) -> None:
        """Stop generating; the request fails. A second call changes nothing."""
        task = self._tasks.get(request)
        if task is not None and not task.cancelling():
            record = f"end of {request}"
            task.add_done_callback(lambda _: self._start(record, self._record_cancelled(request)))
            task.cancel()

    async def stop(self) -> None:
        """Stop all work; unfinished requests stay accepted."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def delete(self, checkpoint: sqlite3.Row) -> None:
        """Delete a checkpoint: its row, what servers hold of it, and its files.

        An adapter is unloaded after its row is gone; if servers cannot be told now, they keep it
        until its place is needed. The weights of a whole model must be off the servers before.

        Raises:
            SkyctlError: they cannot be taken off now; nothing was deleted.
        """
        # by its directory: another may be saved under its path before it is gone
        directory, sql = str(checkpoint["directory"]), "DELETE FROM checkpoints WHERE directory = ?"
        if _is_adapter(checkpoint):
            await self._ledger.write(sql, directory)
            try:
                await self._servers.unload(label_of(directory))
            except SkyctlError as error:
                _LOG.warning("%s: %s", label_of(directory), error)
        else:
            async with self._servers.leaving(directory):
                await self._ledger.write(sql, directory)
        shutil.rmtree(directory, ignore_errors=True)

    async def _record_cancelled(self, request: str) -> None:
        """Record the cancellation, wherever its task was: waiting for a slot, or not begun."""

        def commit(connection: sqlite3.Connection) -> str:
            row = connection.execute("SELECT * FROM requests WHERE id = ?", (request,)).fetchone()
            if row["state"] == "accepted":
                outcome = Outcome(b"cancelled by its client", category="user")
                record_outcome(connection, row, outcome)
            return str(row["owner"])

        self._bell.ring(request, await self._ledger.insist(commit))

    async def _carry_out(self, request: str) -> None:
        sql = "SELECT * FROM requests WHERE id = ?"
        async with self._slots:
            row = await self._ledger.insist(lambda c: c.execute(sql, (request,)).fetchone())
            if row is None or row["state"] != "accepted":
                return
            try:
                result = await self._sample(row)
                outcome = Outcome(result, "application/x-protobuf")
            except Refused as error:
                outcome = Outcome(str(error).encode(), category=error.category)
            except (SkyctlError, WorkerDied) as error:
                category = "user" if getattr(error, "status", None) == 400 else "server"
                outcome = Outcome(str(error).encode(), category=category)
            except Exception as error:
                _LOG.exception("%s", request)
                outcome = Outcome(f"the sample failed: {error!r}".encode(), category="server")
            await self._ledger.insist(lambda c: _record(c, row, outcome))
            self._bell.ring(request, row["owner"])

    async def _sample(self, row: sqlite3.Row) -> bytes:
        sample = question(json.loads(row["body"]))
        weights = await self._weights_of(row["owner"])
        while True:
            try:
                return await self._drawn(sample, weights, row["id"])
            except (SkyctlError, Refused, WorkerDied):
                # a sampler that follows its run moves on at any time, and what it had goes
                before, weights = weights, await self._weights_of(row["owner"])
                if weights == before:
                    raise

    async def _weights_of(self, sampler: str) -> _Weights:
        """What a sampler samples from now."""
        row = await self._ledger.row(
            "SELECT samplers.path, directory, config FROM samplers LEFT JOIN checkpoints "
            "ON checkpoints.path = samplers.path WHERE samplers.id = ?",
            sampler,
        )
        assert row is not None  # checked when it was accepted
        if row["path"] is None:
            return _Weights()
        if row["directory"] is None:
            raise Unanswerable(f"{row['path']} was deleted, or its time is over")
        return _Weights(row["directory"], _is_adapter(row))

    async def _drawn(self, sample: Question, weights: _Weights, request: str) -> bytes:
        """The response to a sample from these weights."""
        directory, name, adapter = weights.directory, self._servers.base, None
        if directory is not None and weights.adapter:
            name = label_of(directory)
            adapter = (name, directory)
        scored = bool(sample.prompt_logprobs or sample.top_prompt or sample.targets is not None)
        if scored and len(sample.tokens) >= self._servers.context:
            return await self._scored_alone(sample, directory)
        body = completion_body(sample, name, self._servers.context)
        prompt = asyncio.create_task(self._about_prompt(sample, directory))
        try:
            whole = None if adapter else directory
            answer = await self._answer(body, whole, adapter, request)
            return sample_response(sample, answer, await prompt)
        finally:
            prompt.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _answer(
        self,
        body: Mapping[str, Any],
        weights: str | None,
        adapter: tuple[str, str] | None,
        session: str,
    ) -> dict[str, Any]:
        """A completion with this adapter, which is loaded again if something else unloads it."""
        attempts = _ATTEMPTS
        while True:
            try:
                async with self._servers.using(*adapter) if adapter else nullcontext():
                    return await self._servers.complete(body, weights, session)
            except AdapterGone:
                attempts -= 1
                if not attempts:
                    raise

    async def _scored_alone(self, sample: Question, directory: str | None) -> bytes:
        """A response about a prompt that fills the context: no server could add a token."""
        about = await self._about_prompt(sample, directory)
        message = wire.message("SampleResponse").FromString(about)
        for _ in range(sample.samples):
            message.sequences.add(stop_reason=wire.LENGTH, logprobs=b"")
        return bytes(message.SerializeToString())

    async def _about_prompt(self, sample: Question, directory: str | None) -> bytes:
        """The fields of a SampleResponse that are about the prompt: the worker computes them."""
        if not sample.prompt_logprobs and not sample.top_prompt and sample.targets is None:
            return b""
        header = {
            "do": "prompt_logprobs",
            "directory": directory,
            "tokens": sample.tokens,
            "wanted": sample.prompt_logprobs,
            "top": sample.top_prompt,
            "last": sample.last,
        }
        targets = b"" if sample.targets is None else _tensor(sample.targets)
        await self._worker.ensure()
        _, answer = await self._worker.call(header, targets)
        return answer


def _record(connection: sqlite3.Connection, row: sqlite3.Row, outcome: Outcome) -> None:
    """Give a sample its outcome; until now its sampler was in use."""
    record_outcome(connection, row, outcome)
    sql = "UPDATE samplers SET used = ? WHERE id = ?"
    connection.execute(sql, (time.time(), row["owner"]))


def _is_adapter(checkpoint: sqlite3.Row) -> bool:
    return bool(json.loads(checkpoint["config"])["lora"]["rank"])


def _tensor(value: Mapping[str, Any]) -> bytes:
    """A serialized Tensor of the SDK's JSON."""
    if value.get("sparse_crow_indices") is not None:
        raise Unanswerable("target_prompt_logprobs must be dense here")
    data: Sequence[int] = value["data"]
    message = wire.message("Tensor")(
        dense=array.array("q", data).tobytes(), dtype=wire.INT64, shape=value.get("shape")
    )
    return bytes(message.SerializeToString())
