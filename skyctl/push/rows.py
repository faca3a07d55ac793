"""Rows of the checkpoint that servers must hold: which to ask for, and what an answer proves.

Digests show whether servers agree with each other. A single server, or garbage that is the same on
all servers, has to be compared with the checkpoint itself: a few values of every kind of tensor and
of every layer, wherever vLLM fused, split or packed them (`wire/messages.py`).
"""

from __future__ import annotations

import math
import os
import random
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.header import DTYPE_BITS, Tensor, torch_name
from skyctl.wire.messages import ROW_WIDTH, RowAnswer, RowQuestion, row_number

_PER_KIND = 2
_MOST_LAYERS = 64
_ROWS = 4


@dataclass(frozen=True)
class KnownRows:
    """One question, with the checkpoint's bytes of each of its rows."""

    question: RowQuestion
    data: Mapping[int, bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.data.values()))


@dataclass(frozen=True)
class Compared:
    """How much of a checkpoint a server was seen to hold: the number of tensors of which rows were
    compared, and the bytes of these rows. `reasons` counts the requested tensors that could not be
    compared.
    """

    tensors: int = 0
    bytes: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def why_not(self) -> str:
        """The most frequent reason why a tensor could not be compared."""
        return max(self.reasons, key=lambda reason: self.reasons[reason], default="")


def choose_rows(checkpoint: Checkpoint) -> list[RowQuestion]:
    """The questions about a checkpoint, which follow from its identity: the same for every server
    and every attempt, others for the next checkpoint.
    """
    return questions_about(checkpoint.tensors, checkpoint.identity_digest)


def questions_about(tensors: Iterable[Tensor], seed: str) -> list[RowQuestion]:
    """Choose questions about every kind of tensor, and about every layer of up to 64."""
    chance = random.Random(seed)
    kinds: dict[str, list[Tensor]] = {}
    layers: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes and DTYPE_BITS[tensor.dtype] >= 8:
            kind = ".".join("#" if part.isdecimal() else part for part in tensor.name.split("."))
            kinds.setdefault(kind, []).append(tensor)
            if layer := layer_of(tensor.name):
                layers.setdefault(layer, []).append(tensor)
    chosen: dict[str, Tensor] = {}
    for members in kinds.values():
        for begin, end in _even_parts(len(members), _PER_KIND):
            picked = chance.choice(members[begin:end])
            chosen[picked.name] = picked
    covered = {layer_of(name) for name in chosen}
    missing = [members for layer, members in layers.items() if layer not in covered]
    for members in chance.sample(missing, min(len(missing), _MOST_LAYERS)):
        picked = chance.choice(members)
        chosen[picked.name] = picked
    return [_question(tensor, chance) for tensor in chosen.values()]


def layer_of(name: str) -> str:
    """`model.layers.3` for a tensor in that layer; "" for embeddings, the final norm and the output
    head, which are one layer: they may be tied.
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _even_parts(length: int, count: int) -> Iterable[tuple[int, int]]:
    """Begin and end of up to `count` even parts, none empty."""
    count = min(count, length)
    return pairwise(length * i // count for i in range(count + 1))


def _question(tensor: Tensor, chance: random.Random) -> RowQuestion:
    """Up to four rows, one in each quarter: every tensor-parallel rank is likely to hold one."""
    shape = list(tensor.shape)
    height = shape[0] if len(shape) > 1 else 1
    width = math.prod(shape) // height
    rows = [chance.randrange(begin, end) for begin, end in _even_parts(height, _ROWS)]
    begin = chance.randrange(max(1, width - ROW_WIDTH + 1))
    dtype = torch_name(tensor.dtype, tensor.name)
    return RowQuestion(tensor.name, dtype, shape, rows, begin, min(width, begin + ROW_WIDTH))


def read_rows(checkpoint: Checkpoint) -> tuple[KnownRows, ...]:
    """Read the chosen rows from the files: about 500 bytes a question.

    Raises:
        OSError: a file cannot be read.
    """
    questions = choose_rows(checkpoint)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    by_shard: dict[int, list[RowQuestion]] = {}
    for question in questions:
        by_shard.setdefault(tensors[question.name].shard, []).append(question)
    rows: list[KnownRows] = []
    for shard, of_shard in by_shard.items():
        with Path(checkpoint.shards[shard].path).open("rb") as file:
            rows += [
                _read(file.fileno(), tensors[question.name], question) for question in of_shard
            ]
    return tuple(rows)


def _read(descriptor: int, tensor: Tensor, question: RowQuestion) -> KnownRows:
    size = DTYPE_BITS[tensor.dtype] // 8
    _, width = question.matrix
    length = (question.end - question.begin) * size
    data = {}
    for row in question.rows:
        at = tensor.begin + (row * width + question.begin) * size
        data[row] = os.pread(descriptor, length, at)
    return KnownRows(question, data)


class Mismatch(Exception):
    """A worker holds something other than the checkpoint, or nobody holds a part of it."""


def compare(rows: Sequence[KnownRows], workers: Sequence[Mapping[str, Any]]) -> Compared:
    """What the workers of one model (all ranks of one data-parallel replica) prove by their rows.

    Raises:
        Mismatch: names the tensor and the row.
        TypeError, LookupError, ValueError: an answer has another shape.
    """
    tensors = compared = 0
    reasons: Counter[str] = Counter()
    wrong: list[str] = []
    answers = [[RowAnswer(**row) for row in worker.get("rows", ())] for worker in workers]
    if any(len(answer) != len(rows) for answer in answers):
        raise ValueError("a worker left questions out")
    for number, expected in enumerate(rows):
        of_workers = [answer[number] for answer in answers]
        name = expected.question.name
        if any(answer.name != name for answer in of_workers):
            raise ValueError(f"a worker answered about another tensor than {name}")
        problem, reason = _judge(expected, of_workers)
        if problem:
            wrong.append(f"{name}: {problem}")
        elif reason:
            reasons[reason] += 1
        else:
            tensors, compared = tensors + 1, compared + expected.nbytes
    if wrong:
        more = f" ({len(wrong)} of {len(rows)} tensors asked for)" if len(wrong) > 1 else ""
        raise Mismatch(wrong[0] + more)
    return Compared(tensors, compared, dict(reasons))


def _judge(rows: KnownRows, answers: Iterable[RowAnswer]) -> tuple[str, str]:
    """What is wrong with a tensor, and why it could not be compared; both "" if it is as sent."""
    question = rows.question
    missing = {row: set(range(question.begin, question.end)) for row in question.rows}
    reason = ""
    for answer in answers:
        reason = reason or answer.reason
        for row, begin, end, number in answer.pieces:
            expected = _number(rows, row, begin, end, answer.dtype)
            if expected is None:
                reason = reason or f"{question.dtype} is not comparable with {answer.dtype}"
            elif expected != number:
                return f"row {row}, columns {begin} to {end} are not those of the checkpoint", ""
            missing[row] -= set(range(begin, end))
    if reason:
        return "", reason
    row_of = next((row for row, columns in missing.items() if columns), None)
    return ("" if row_of is None else f"no worker holds row {row_of}"), ""


def _number(rows: KnownRows, row: int, begin: int, end: int, dtype: str) -> int | None:
    """`row_number` of these columns in the checkpoint, as `dtype`; None if rounding to that type is
    not defined here.
    """
    question = rows.question
    data = rows.data[row]
    size = len(data) // (question.end - question.begin)
    if not question.begin <= begin < end <= question.end:
        raise ValueError(f"{question.name}: columns {begin} to {end} were not asked for")
    part = data[(begin - question.begin) * size : (end - question.begin) * size]
    converted = _rounded(part, question.dtype, dtype)
    return None if converted is None else row_number(converted, dtype)


def _rounded(data: bytes, dtype: str, other: str) -> bytes | None:
    """`data` as another type, rounded to nearest, ties to even, as torch does."""
    if dtype == other:
        return data
    if dtype == "float16":
        values = struct.unpack(f"<{len(data) // 2}e", data)
        data = struct.pack(f"<{len(values)}f", *values)
    elif dtype == "bfloat16":
        data = array("I", [word << 16 for word in array("H", data)]).tobytes()
    elif dtype != "float32":
        return None
    if other == "float32":
        return data
    if other == "bfloat16":
        words = array("I", data)
        if any(word & 0x7F80_0000 == 0x7F80_0000 for word in words):
            return None
        return array("H", [(w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words]).tobytes()
    if other == "float16":
        try:
            return struct.pack(f"<{len(data) // 4}e", *struct.unpack(f"<{len(data) // 4}f", data))
        except OverflowError:
            return None
    return None
