"""Carries out samples on the fleet's servers, each with the adapter of its sampler.

vLLM 0.32 cannot return prompt logprobs with adapters loaded: the training worker computes them. A
sample that was unfinished when the process died is generated again.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import math
import shutil
import sqlite3
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from skyctl.errors import ServerError, SkyctlError
from skyctl.tinker import wire
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.long_polls import Doorbell
from skyctl.tinker.requests import Outcome, record_outcome
from skyctl.tinker.training_process import Refused, Worker, WorkerDied
from skyctl.tinker.weights import label_of

_LOG = logging.getLogger(__name__)
SAMPLE = "sample"
COMPLETIONS = "/v1/completions"
MOST_TOP = 20
_LARGEST_SEED = 2**63 - 1


class Unanswerable(Refused):
    """The request cannot be answered here; the text is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "user")


class Servers(Protocol):
    """The fleet's servers, as sampling needs them."""

    base: str
    """The model name of requests to the base model."""
    context: int

    async def complete(self, body: Mapping[str, Any], weights: str | None) -> dict[str, Any]:
        """The answer to a /v1/completions body, by servers whose own weights are those in this
        directory; None: those that the fleet was given.

        Raises:
            ServerError: it was refused. SkyctlError: the weights cannot be brought there.
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
class Question:
    """One `asample`, checked."""

    tokens: tuple[int, ...]
    """The prompt."""
    samples: int
    """The number of sequences to generate."""
    max_tokens: int | None
    """The most tokens to generate; None: as many as fit."""
    seed: int | None
    """Seed of the samples; None: any."""
    stop: list[str] | list[int] | None
    """Stop texts or stop token ids; None: the model's own end; []: never."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_k: int
    """Sample from this many tokens; -1: all."""
    top_p: float
    """Sample from tokens of this cumulative probability."""
    top_sampled: int
    """Number of most likely tokens to return per generated token."""
    prompt_logprobs: bool
    """Whether to return the prompt's log probabilities."""
    top_prompt: int
    """Number of most likely tokens to return per prompt token."""
    last: int | None
    """Return only this many rows about the prompt; None: all."""
    targets: dict[str, Any] | None
    """Token ids whose log probabilities to return, as the SDK's JSON of a tensor."""


def question(body: Mapping[str, Any]) -> Question:
    """Parse an asample body.

    Raises:
        Unanswerable: it is not offered, or makes no sense.
    """
    for name in ("prompt_alt_tokens_k", "record_stability_info"):
        if body.get(name):
            raise Unanswerable(f"{name} is not offered here")
    tokens: list[int] = []
    for chunk in (body.get("prompt") or {}).get("chunks") or []:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise Unanswerable("images and audio are not offered here: text tokens only")
        tokens += [int(token) for token in chunk["tokens"]]
    if not tokens:
        raise Unanswerable("the prompt has no tokens")
    if min(tokens) < 0:
        raise Unanswerable("the prompt has negative tokens")
    params = body.get("sampling_params") or {}
    stop = params.get("stop")
    samples, top = int(body.get("num_samples") or 1), int(body.get("topk_sample_logprobs") or 0)
    if not 1 <= samples <= 1024:
        raise Unanswerable(f"num_samples {samples} is not offered: 1 to 1024")
    top_prompt = max(0, int(body.get("topk_prompt_logprobs") or 0))
    if max(top, top_prompt) > MOST_TOP:
        raise Unanswerable(f"at most {MOST_TOP} top logprobs are offered")
    last, most = body.get("prompt_logprobs_last_n"), params.get("max_tokens")
    if last is not None and not 1 <= last < len(tokens):
        raise Unanswerable("prompt_logprobs_last_n must be from 1 to the prompt's length − 1")
    for name in ("temperature", "top_p"):
        if not math.isfinite(float(params.get(name, 1.0))):
            raise Unanswerable(f"{name} is not finite")
    return Question(
        tokens=tuple(tokens),
        samples=samples,
        max_tokens=None if most is None else int(most),
        seed=None if (seed := params.get("seed")) is None else int(seed),
        stop=[stop] if isinstance(stop, str) else stop,
        temperature=float(params.get("temperature", 1.0)),
        top_k=int(params.get("top_k", -1)),
        top_p=float(params.get("top_p", 1.0)),
        top_sampled=top,
        prompt_logprobs=bool(body.get("prompt_logprobs")),
        top_prompt=top_prompt,
        last=last,
        targets=body.get("target_prompt_logprobs"),
    )


def completion_body(sample: Question, model: str, context: int) -> dict[str, Any]:
    """The /v1/completions body. Constraints of vLLM 0.32: n > 1 is refused with temperature 0, a
    seed has 63 bits, and stop texts must be part of the text if tokens are to match it.

    Raises:
        Unanswerable: the prompt leaves no room for a token.
    """
    room = context - len(sample.tokens)
    if room < 1:
        raise Unanswerable(
            f"the prompt has {len(sample.tokens)} tokens; the model takes {context} in all"
        )
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(sample.tokens),
        "n": 1 if sample.temperature == 0 else sample.samples,
        "max_tokens": room if sample.max_tokens is None else min(sample.max_tokens, room),
        "temperature": sample.temperature,
        "top_k": sample.top_k,
        "top_p": sample.top_p,
        "logprobs": sample.top_sampled,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if sample.seed is not None:
        body["seed"] = sample.seed % _LARGEST_SEED
    if sample.stop is None:
        return body
    if not sample.stop:
        body["ignore_eos"] = True
    elif isinstance(sample.stop[0], int):
        body["stop_token_ids"] = sample.stop
    else:
        body |= {"stop": sample.stop, "include_stop_str_in_output": True}
    return body


def sample_response(sample: Question, answer: Mapping[str, Any], about_prompt: bytes) -> bytes:
    """A serialized SampleResponse of vLLM's answer; `about_prompt` is one too, merged into it."""
    message = wire.message("SampleResponse").FromString(about_prompt)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) == 1:
        choices = choices * sample.samples  # greedy: asked once
    for choice in choices:
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(tokens) != len(logprobs):
            raise ServerError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
        stopped = choice["finish_reason"] == "stop"
        sequence = message.sequences.add(stop_reason=wire.STOP if stopped else wire.LENGTH)
        sequence.tokens = array.array("i", tokens).tobytes()
        sequence.logprobs = array.array("f", logprobs).tobytes()
        if sample.top_sampled:
            _add_top(sequence.topk_sampled_logprobs, choice["logprobs"], sample.top_sampled)
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    message.prompt_cache_hit_tokens = details.get("cached_tokens") or 0
    return bytes(message.SerializeToString())


def _add_top(message: Any, logprobs: Mapping[str, Any], k: int) -> None:
    ids, values = array.array("i"), array.array("f")
    for row in logprobs["top_logprobs"]:
        best = sorted(row.items(), key=lambda pair: -pair[1])[:k]
        best += [("token_id:0", -99999.0)] * (k - len(best))
        ids.extend(int(token.rsplit(":", 1)[-1]) for token, _ in best)
        values.extend(value for _, value in best)
    message.token_ids, message.logprobs = ids.tobytes(), values.tobytes()
    message.k, message.length = k, len(logprobs["top_logprobs"])


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
        directory, sql = str(checkpoint["directory"]), "DELETE FROM checkpoints WHERE path = ?"
        if _is_adapter(checkpoint):
            await self._ledger.write(sql, checkpoint["path"])
            try:
                await self._servers.unload(label_of(directory))
            except SkyctlError as error:
                _LOG.warning("%s: %s", label_of(directory), error)
        else:
            async with self._servers.leaving(directory):
                await self._ledger.write(sql, checkpoint["path"])
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
            await self._ledger.insist(lambda c: record_outcome(c, row, outcome))
            self._bell.ring(request, row["owner"])

    async def _sample(self, row: sqlite3.Row) -> bytes:
        sample = question(json.loads(row["body"]))
        sampler = await self._ledger.row("SELECT * FROM samplers WHERE id = ?", row["owner"])
        assert sampler is not None  # checked when it was accepted
        name, directory, weights = self._servers.base, None, None
        if sampler["path"] is not None:
            checkpoint = await self._ledger.row(
                "SELECT directory, config FROM checkpoints WHERE path = ?", sampler["path"]
            )
            if checkpoint is None:
                raise Unanswerable(f"{sampler['path']} was deleted, or its time is over")
            directory = str(checkpoint["directory"])
            if _is_adapter(checkpoint):
                name = label_of(directory)
            else:
                weights = directory
        body = completion_body(sample, name, self._servers.context)
        prompt = asyncio.create_task(self._about_prompt(sample, directory))
        try:
            adapter: AbstractAsyncContextManager[None] = nullcontext()
            if directory is not None and weights is None:
                adapter = self._servers.using(name, directory)
            async with adapter:
                answer = await self._servers.complete(body, weights)
            return sample_response(sample, answer, await prompt)
        finally:
            prompt.add_done_callback(lambda task: task.cancelled() or task.exception())

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
