"""Whether a checkpoint fits the servers of a push: they are asked what they compute by and load.

Files beside its tensors decide which tokens a request is, and where its answer ends: servers read
them as they start, and a push does not carry them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint, locate
from skyctl.checkpoints.compat import (
    Answer,
    check_compatible,
    open_questions,
    read_running,
    reference,
)
from skyctl.checkpoints.header import read_json, read_plain, remembered, torch_name
from skyctl.engines.base import lacks_method
from skyctl.errors import ServerError
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.server_facts import ServerFacts
from skyctl.push.servers import PushedServer
from skyctl.wire.messages import TensorUse
from skyctl.wire.worker import WorkerMethod

_TEMPLATE = "chat_template.jinja"
_TOKENIZER_KEYS = ("eos_token", "bos_token", "add_bos_token", "added_tokens_decoder")
_SAVED_STATE = ("padding", "truncation", "version")
"""Parts of tokenizer.json that say how it was last used."""
_GENERATION_META = ("transformers_version", "_from_model_config", "use_cache", "pad_token_id")


def chat_note(directory: Path, model_path: str | None) -> str:
    """One line about files that differ from those the servers were started with; "" if none do,
    if the checkpoint has none, or if the servers' are not here.
    """
    base = locate(model_path) if model_path else None
    if base is None or not base.is_dir():
        return ""
    ours, theirs = _settings(directory), _settings(base)
    changed = [
        name for name in ours if name in theirs and ours[name] and ours[name] != theirs[name]
    ]
    if not changed:
        return ""
    return (
        f"{' and '.join(changed)} differ from what the servers run, and a push carries tensors "
        "alone: clients get the servers' until they are restarted"
    )


def _settings(directory: Path) -> dict[str, Any]:
    """What decides, by the words for it; {} and None for what a file does not say."""
    tokenizer = _mapping(directory / "tokenizer.json")
    settings = _mapping(directory / "tokenizer_config.json")
    generation = _mapping(directory / "generation_config.json")
    return {
        "the tokenizer": _without(tokenizer, _SAVED_STATE),
        "its special tokens": {key: settings[key] for key in _TOKENIZER_KEYS if key in settings},
        "eos_token_id of config.json": _mapping(directory / "config.json").get("eos_token_id"),
        "the chat template": _template(directory) or settings.get("chat_template"),
        "generation_config.json (stop tokens, sampling)": _without(generation, _GENERATION_META),
    }


def _mapping(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = read_json(path)
        return content if isinstance(content, dict) else {}
    return {}


def _without(mapping: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """What a mapping says, but for `keys`."""
    return {key: value for key, value in mapping.items() if key not in keys and value is not None}


def _template(directory: Path) -> str:
    with suppress(OSError, ValueError):
        return read_plain(directory / _TEMPLATE).decode("utf-8")
    return ""


_KEPT = 256
_answers: dict[tuple[str, str], Answer] = {}
"""The latest answers, by `PushServer.instance` and a digest of the question."""


@dataclass(frozen=True)
class Fit:
    """What is known of a checkpoint that fits the servers."""

    notes: list[str]
    """Lines the operator should read."""
    names_compared: bool
    """Whether a checkpoint that the servers loaded was there to compare names with."""


async def check_fit(
    request: PushRequest,
    checkpoint: Checkpoint,
    fleet: PushFleet,
    facts: Sequence[ServerFacts],
    servers: Sequence[PushedServer],
) -> Fit:
    """Compare the checkpoint with what the servers run.

    Raises:
        PreflightError: it does not fit. ServerError: a server does not answer.
    """
    launched = next((fact.process.model for fact in facts if fact.process.model), None)
    model_path = reference(launched, fleet.model_path) if launched else fleet.model_path
    base = await asyncio.to_thread(read_running, model_path)
    tensors = [
        (tensor.name, torch_name(tensor.dtype, tensor.name), list(tensor.shape))
        for tensor in open_questions(checkpoint, base)
    ]
    question = {"config": dict(checkpoint.config), "tensors": tensors}
    timeout_s = fleet.timeouts.control_s
    answers = await asyncio.gather(*(_ask(server, question, timeout_s) for server in servers))
    notes = await asyncio.to_thread(
        check_compatible,
        checkpoint,
        base,
        [answer for answer in answers if answer is not None],
        allowed=request.allow_config,
    )
    note = await asyncio.to_thread(chat_note, checkpoint.path, model_path)
    return Fit([*notes, note] if note else notes, base.checkpoint is not None)


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
