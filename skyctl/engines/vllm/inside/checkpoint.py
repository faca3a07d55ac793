"""Checkpoint tensors out of the running model: where each lies in it, and its values, written into
a file of which every worker writes its part. The inverse of vLLM's loader, found as `placement.py`
does.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from skyctl.engines.vllm.inside.digest import is_packed, values_of
from skyctl.engines.vllm.inside.layout import ignored_tensors
from skyctl.engines.vllm.inside.placement import NotComparable, Placement, tracing
from skyctl.wire.messages import ReadTensor, RowQuestion, TensorPart, matrix_of

_COLUMNS = 512
"""As many columns of a layer that a CPU has packed are read at a time."""


def parts_of(model: Any, tensors: Sequence[ReadTensor]) -> list[TensorPart]:
    """What this worker has of each tensor, in order."""
    skipped = set(ignored_tensors(model))
    parts = []
    for tensor, (placements, reason) in zip(tensors, _placed(model, tensors), strict=True):
        if reason and tensor.name in skipped:
            parts.append(TensorPart(tensor.name))
            continue
        dtypes = {getattr(place.layer, place.attribute).dtype for place in placements}
        dtype = str(next(iter(dtypes), "")).removeprefix("torch.")
        boxes = [[place.row, place.column, place.height, place.width] for place in placements]
        parts.append(TensorPart(tensor.name, dtype, boxes, reason))
    return parts


def write_tensors(model: Any, path: str, inode: int, tensors: Sequence[ReadTensor]) -> None:
    """Write this worker's part of each tensor to its place in the file.

    Raises:
        RuntimeError: the file is another one here, or a tensor cannot be read.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise RuntimeError(f"{path} is another file for this worker: it is elsewhere")
        octets = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)
    with torch.inference_mode():
        for tensor, (placements, reason) in zip(tensors, _placed(model, tensors), strict=True):
            if reason:
                raise RuntimeError(f"{tensor.name}: {reason}")
            dtype = getattr(torch, tensor.dtype)
            length = math.prod(tensor.shape) * dtype.itemsize
            file = octets[tensor.offset : tensor.offset + length].view(dtype)
            matrix = file.view(matrix_of(tensor.shape))
            for place in placements:
                _read_into(matrix, place)


def _read_into(matrix: torch.Tensor, place: Placement) -> None:
    rows = slice(place.held_row, place.held_row + place.height)
    target = matrix[place.row : place.row + place.height]
    step = _COLUMNS if is_packed(place.layer) else place.width
    for first in range(0, place.width, step):
        last = min(place.width, first + step)
        try:
            values = values_of(place, rows, place.held_column + first, place.held_column + last)
        except NotComparable as error:
            raise RuntimeError(f"{place.attribute} of a layer: {error}") from error
        target[:, place.column + first : place.column + last].copy_(values)


def _placed(model: Any, tensors: Sequence[ReadTensor]) -> list[tuple[list[Placement], str]]:
    """Where the model has each tensor, each part once, or why it cannot be read."""
    questions = [_question(tensor) for tensor in tensors]
    placed: list[tuple[list[Placement], str]] = []
    with tracing(model) as tracer:
        traces = tracer.trace(questions)
        for question, trace in zip(questions, traces, strict=True):
            try:
                placements = tracer.placements(question, trace)
            except NotComparable as error:
                placed.append(([], str(error)))
                continue
            distinct = {(p.row, p.column, p.height, p.width): p for p in placements}
            placed.append((list(distinct.values()), ""))
    return placed


def _question(tensor: ReadTensor) -> RowQuestion:
    return RowQuestion(tensor.name, tensor.dtype, list(tensor.shape), [], 0, 1)
