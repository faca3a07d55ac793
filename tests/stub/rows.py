"""The tensors a stub was given, and its answers to questions about their rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.dtypes import DTYPE_BITS, torch_name
from skyctl.engines.vllm.inside.wire import RowAnswer, RowQuestion, row_number
from skyctl.errors import SkyctlError

KEPT_BYTES = 4 * 1024 * 1024
"""Larger tensors are not kept: a stub stands in for models of any size."""

Contents = dict[str, tuple[str, bytes]]
"""torch's dtype and the bytes, by name."""


def of_checkpoint(directory: str) -> Contents:
    """The tensors of a checkpoint directory; nothing where it is none."""
    if not Path(directory).is_dir():
        return {}
    try:
        checkpoint = read_checkpoint(directory)
    except SkyctlError:
        return {}
    found: Contents = {}
    for tensor in checkpoint.tensors:
        if DTYPE_BITS[tensor.dtype] >= 8 and tensor.nbytes <= KEPT_BYTES:
            with Path(checkpoint.shards[tensor.shard].path).open("rb") as file:
                file.seek(tensor.begin)
                dtype = torch_name(tensor.dtype, tensor.name)
                found[tensor.name] = (dtype, file.read(tensor.nbytes))
    return found


def of_update(init_info: Mapping[str, Any], update: Mapping[str, Any]) -> Contents:
    """The tensors of one chunk in the sender's shared memory; nothing by other transports."""
    endpoint = init_info.get("endpoint", {})
    if "fds" not in endpoint or "offsets" not in update:
        return {}
    path = f"/proc/{endpoint['pid']}/fd/{endpoint['fds'][update['slot']]}"
    found: Contents = {}
    columns = (update[key] for key in ("names", "dtype_names", "shapes", "offsets"))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for name, dtype, shape, offset in zip(*columns, strict=True):
            size = _itemsize(dtype)
            for length in shape:
                size *= length
            if size <= KEPT_BYTES:
                found[name] = (dtype, os.pread(descriptor, size, offset))
    finally:
        os.close(descriptor)
    return found


def answers(contents: Contents, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As a worker that holds all of a model as it is in the checkpoint."""
    return [asdict(_answer(contents, RowQuestion(**asked))) for asked in questions]


def _answer(contents: Contents, question: RowQuestion) -> RowAnswer:
    if question.name not in contents:
        return RowAnswer(question.name, reason="the stub did not see its bytes")
    dtype, data = contents[question.name]
    size, (_, width) = _itemsize(dtype), question.matrix
    begin, end = question.begin, question.end
    pieces = []
    for row in question.rows:
        part = data[(row * width + begin) * size : (row * width + end) * size]
        pieces.append((row, begin, end, row_number(part, dtype)))
    return RowAnswer(question.name, dtype, pieces)


def _itemsize(dtype: str) -> int:
    by_name = {torch_name(name, ""): bits // 8 for name, bits in DTYPE_BITS.items() if bits >= 8}
    return by_name[dtype]
