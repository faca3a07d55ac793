"""Whether a checkpoint fits the model the servers run: by headers, config, and what servers say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint, locate, read_checkpoint, read_config
from skyctl.checkpoints.configs import Difference, compare_configs, differences
from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError, SkyctlError
from skyctl.wire.messages import TensorUse

_SHOWN = 3
_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
_COMPARED_BYTES = 16 * 1024 * 1024
_NEVER_LOADED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True)
class Base:
    """The checkpoint that the servers were started with, as far as this machine has it."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Its config.json, {} if that is not here."""
    checkpoint: Checkpoint | None = None
    """Its headers; None if it holds no tensors, or is not here."""
    note: str = ""
    """What cannot be compared with it."""


@dataclass(frozen=True)
class Answer:
    """What a server says of a checkpoint (`engines/vllm/inside/fit.py`)."""

    running: Mapping[str, Any]
    """The configuration that it computes by."""
    pushed: Mapping[str, Any] | None
    """The checkpoint's configuration as it would read it; None if it cannot."""
    uses: Mapping[str, TensorUse]
    """What its loader makes of the tensors that it was asked about, by name."""
    ties_output: bool
    """Whether its output layer computes with the embeddings' weight."""


def read_running(model_path: str | None) -> Base:
    """The checkpoint at `model_path`, a directory or hub id, None when unknown."""
    directory = locate(model_path) if model_path else None
    if model_path is None or directory is None:
        which = model_path or "what the servers run"
        return Base(note=f"{which} is not on this machine: names and shapes were not compared")
    try:
        config = read_config(directory)
    except PreflightError:
        return Base(note=f"{directory} has no config.json: names and shapes were not compared")
    # a model loaded with dummy weights has a configuration and no tensors
    if any(directory.glob("*.safetensors")):
        return Base(config, read_base(model_path))
    return Base(config, note=f"{directory} holds no tensors: only its config.json was compared")


def open_questions(checkpoint: Checkpoint, base: Base) -> list[Tensor]:
    """Tensors of which only the servers know whether they matter: those that one of the two lacks,
    or has in another shape.
    """
    if base.checkpoint is None:
        return []
    ours, theirs = _by_name(checkpoint.tensors), _by_name(base.checkpoint.tensors)
    return [
        theirs.get(name) or ours[name]
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape
    ]


def check_compatible(
    checkpoint: Checkpoint,
    base: Base,
    answers: Sequence[Answer] = (),
    *,
    allowed: Collection[str] = (),
) -> list[str]:
    """Compare a checkpoint with what the servers run; returns notes for the operator.

    Args:
        checkpoint: what is to be pushed.
        base: what the servers were started with.
        answers: what servers say of it, as far as they can.
        allowed: keys of config.json in which it may differ; "*" for all.

    Raises:
        PreflightError: names, shapes or configuration differ; `details["problems"]` lists all.
    """
    every = _config_differences(checkpoint, base, answers)
    refused = [difference for difference in every if not difference.is_allowed(allowed)]
    problems = [str(difference) for difference in refused]
    notes = [base.note] if base.note else []
    if base.checkpoint is None:
        problems += [
            f"{name} is in its index, and in none of its files" for name in checkpoint.absent
        ]
    else:
        judged = _Judged(checkpoint, base.checkpoint, answers)
        problems += judged.problems
        notes += judged.notes
        notes += compare_dtypes(checkpoint.tensors, base.checkpoint.tensors)
    if problems:
        raise PreflightError(
            f"{checkpoint.path} does not fit the running model: {in_short(problems)}",
            hint=_hint(refused if len(refused) == len(problems) else []),
            details={"problems": problems},
        )
    return notes


def _hint(refused: Sequence[Difference]) -> str:
    hint = "push a checkpoint of the same architecture, or start a fleet on this one"
    if not refused:
        return hint
    options = " ".join(f"--allow-config {key}" for key in dict.fromkeys(d.root for d in refused))
    return f"{hint}; or, to have its tensors computed as the servers do: {options}"


def _config_differences(
    checkpoint: Checkpoint, base: Base, answers: Sequence[Answer]
) -> list[Difference]:
    """What differs from any of the servers, once each; without answers, from the base's file."""
    if not answers:
        return compare_configs(checkpoint.config, base.config) if base.config else []
    every: dict[str, Difference] = {}
    for answer in answers:
        if answer.pushed is None:
            each = compare_configs(checkpoint.config, answer.running)
        else:
            each = differences(answer.pushed, answer.running)
        every |= {str(difference): difference for difference in each}
    return list(every.values())


class _Judged:
    """Differences of two sets of tensors, by what the servers make of each."""

    def __init__(self, checkpoint: Checkpoint, base: Checkpoint, answers: Sequence[Answer]) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._answers, self._config = answers, base.config
        ties = {answer.ties_output for answer in answers} or {_ties_output(base)}
        ours, theirs = _by_name(checkpoint.tensors), _by_name(base.tensors)
        unused = []
        for name in sorted(ours.keys() | theirs.keys()):
            mine, other = ours.get(name), theirs.get(name)
            if name.endswith(_HEAD) and True in ties:
                if mine is not None and (problem := _own_head(checkpoint, mine)):
                    self.problems.append(problem)
                if False not in ties:
                    continue
            if (mine and mine.shape) == (other and other.shape):
                continue
            if not self._is_ignored(name):
                self.problems.append(_difference(name, mine, other))
            elif mine is not None:
                unused.append(name)
        untied = checkpoint.config.get("tie_word_embeddings") is False
        if True in ties and untied and not any(name.endswith(_HEAD) for name in ours):
            self.problems.append(f"{_HEAD} is missing, and tie_word_embeddings is false")
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            self.notes.append(f"the servers load nothing of {unused[0]}{more}")

    def _is_ignored(self, name: str) -> bool:
        if self._answers:
            uses = [answer.uses.get(name) for answer in self._answers]
            return all(use is TensorUse.IGNORED for use in uses)
        return name.endswith(_NEVER_LOADED) or _is_predicting(name, self._config)


def _difference(name: str, ours: Tensor | None, theirs: Tensor | None) -> str:
    running = list(theirs.shape) if theirs else []
    if ours is None:
        return f"{name} is missing, the servers run {running}"
    if theirs is None:
        return f"{name} {list(ours.shape)} is not in the model the servers run"
    return f"{name} is {list(ours.shape)} here, the servers run {running}"


def _own_head(checkpoint: Checkpoint, head: Tensor) -> str:
    """Why an output layer's weight cannot be left out where servers tie it to the embeddings; "" if
    it is the same. vLLM ties or not when it starts, by whether the checkpoint has two weights.
    """
    prefix = head.name.removesuffix(_HEAD)
    candidates = [t for t in checkpoint.tensors if t.name.endswith(_EMBEDDINGS)]
    near = [t for t in candidates if t.name.startswith(prefix)] or candidates
    if len(near) == 1 and _same_bytes(checkpoint, head, near[0]):
        return ""
    other = near[0].name if len(near) == 1 else "the embeddings"
    return f"{head.name} differs from {other}, and the servers use one weight for both"


def _same_bytes(checkpoint: Checkpoint, head: Tensor, embeddings: Tensor) -> bool:
    if (head.dtype, head.shape) != (embeddings.dtype, embeddings.shape):
        return False
    pair = head, embeddings
    paths = [Path(checkpoint.shards[tensor.shard].path) for tensor in pair]
    with paths[0].open("rb") as first, paths[1].open("rb") as second:
        for file, tensor in zip((first, second), pair, strict=True):
            file.seek(tensor.begin)
        for begin in range(0, head.nbytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, head.nbytes - begin)
            if first.read(size) != second.read(size):
                return False
    return True


def _ties_output(base: Checkpoint) -> bool:
    """Whether servers started with this checkpoint use one weight for embeddings and output."""
    if not base.config.get("tie_word_embeddings"):
        return False
    heads = [tensor for tensor in base.tensors if tensor.name.endswith(_HEAD)]
    return not any(_own_head(base, head) for head in heads)


def _is_predicting(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is, by its name, a head's that predicts more than the next token: only
    servers that draft with it load it.
    """
    if name.startswith("mtp.") or ".mtp." in name:
        return True
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        first, count = part.get("num_hidden_layers"), part.get("num_nextn_predict_layers")
        if isinstance(first, int) and isinstance(count, int):
            return any(f".layers.{first + number}." in name for number in range(count))
    return False


def _by_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


def reference(launched: str, pushed: str | None) -> str:
    """The checkpoint that shows what the servers run: the one they were launched with, if it is
    local. The one pushed last may have been overwritten since, and a directory always fits itself.
    """
    return launched if pushed is None or locate(launched) is not None else pushed


def read_base(model_path: str) -> Checkpoint:
    """The checkpoint the servers run. Its index may be wrong, as vLLM looks only for files there.

    Raises:
        PreflightError: it cannot be read; the message says that it is not the one to push.
    """
    try:
        return read_checkpoint(model_path, check_index=False)
    except SkyctlError as error:
        raise PreflightError(f"the checkpoint the servers run: {error.message}") from error


def in_short(problems: list[str]) -> str:
    """The first few problems, and how many more there are."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def compare_dtypes(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> list[str]:
    """A note if element types differ: servers cast what they are sent without a warning."""
    running = {tensor.name: tensor.dtype for tensor in theirs}
    changed = [t for t in ours if running.get(t.name, t.dtype) != t.dtype]
    if not changed:
        return []
    first = changed[0]
    return [
        f"{len(changed)} tensors differ in dtype ({first.name} is {first.dtype} here, "
        f"{running[first.name]} in the servers' checkpoint): the servers cast them"
    ]
