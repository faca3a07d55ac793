"""Whether a checkpoint fits the servers of a push: they are asked what they compute by and load."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.checkpoints.chat_files import chat_note
from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.compat import (
    Answer,
    check_compatible,
    open_questions,
    read_running,
    reference,
)
from skyctl.checkpoints.dtypes import torch_name
from skyctl.checkpoints.header import remembered
from skyctl.engines.base import lacks_method
from skyctl.errors import ServerError
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.server_facts import ServerFacts
from skyctl.push.servers import PushedServer
from skyctl.wire.messages import TensorUse
from skyctl.wire.worker import WorkerMethod

_KEPT = 256
_answers: dict[tuple[str, str], Answer] = {}
"""The latest answers, by `PushServer.instance` and a digest of the question."""


async def check_fit(
    request: PushRequest,
    checkpoint: Checkpoint,
    fleet: PushFleet,
    facts: Sequence[ServerFacts],
    servers: Sequence[PushedServer],
) -> list[str]:
    """Compare the checkpoint with what the servers run; returns notes.

    Raises:
        PreflightError: it does not fit. ServerError: a server does not answer.
    """
    launched = next((fact.model for fact in facts if fact.model), None)
    model_path = reference(launched, fleet.model_path) if launched else fleet.model_path
    base = await asyncio.to_thread(read_running, model_path)
    tensors = [
        (tensor.name, torch_name(tensor.dtype, tensor.name), list(tensor.shape))
        for tensor in open_questions(checkpoint, base)
    ]
    question = {"config": dict(checkpoint.config), "tensors": tensors}
    timeout_s = fleet.control_timeout_s
    answers = await asyncio.gather(*(_ask(server, question, timeout_s) for server in servers))
    notes = await asyncio.to_thread(
        check_compatible,
        checkpoint,
        base,
        [answer for answer in answers if answer is not None],
        allowed=request.allow_config,
    )
    note = await asyncio.to_thread(chat_note, checkpoint.path, model_path)
    return [*notes, note] if note else notes


async def _ask(
    server: PushedServer, question: Mapping[str, Any], timeout_s: float
) -> Answer | None:
    """None from a server without skyctl's worker extension."""
    text = json.dumps(question, sort_keys=True).encode()
    key = server.given.instance, hashlib.blake2b(text, digest_size=16).hexdigest()
    if server.given.instance and key in _answers:
        return _answers[key]
    try:
        answers = await server.control.ask_workers(WorkerMethod.FIT, question, timeout_s=timeout_s)
    except ServerError as error:
        if not lacks_method(error):
            raise
        return None
    try:
        answer = _read(answers, [name for name, *_ in question["tensors"]])
    except (LookupError, TypeError, ValueError) as error:
        raise ServerError(
            f"{server.name}: its workers answered something else: {error!r}"
        ) from error
    return (
        remembered(_answers, key, lambda: answer, kept=_KEPT) if server.given.instance else answer
    )


def _read(answers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Answer:
    """One answer of all workers: what one of them loads, their server does."""
    uses: dict[str, TensorUse] = {}
    for number, name in enumerate(names):
        each = {TensorUse(worker["uses"][number]) for worker in answers}
        uses[name] = next(use for use in TensorUse if use in each)
    return Answer(
        dict(answers[0]["running"]),
        answers[0]["pushed"],
        uses,
        any(bool(worker["ties_output"]) for worker in answers),
    )
