"""Rows of checkpoint tensors, read back from the running model.

Digests show whether servers agree; rows show whether they agree on the checkpoint. Where vLLM packs
a weight on CPU, a row is read through what the layer computes with: a linear layer is multiplied by
unit vectors; the packing of experts only changes the order, which is learned by packing numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from skyctl.engines.vllm.inside.digest import input_size, is_packed
from skyctl.engines.vllm.inside.layout_copy import octets_of
from skyctl.engines.vllm.inside.placement import NotComparable, Placement, Trace, Tracer, tracing
from skyctl.engines.vllm.inside.wire import RowAnswer, RowQuestion, row_number

_DIGIT = 256  # counts up to here are exact in every floating type a model is held in


def answer_rows(model: Any, questions: Sequence[RowQuestion]) -> list[RowAnswer]:
    """One answer per question, in order. The model must not be in the middle of an update."""
    if not questions:
        return []
    try:
        with torch.inference_mode(), tracing(model) as tracer:
            traces = tracer.trace(questions)
            return [_answer(tracer, *each) for each in zip(questions, traces, strict=True)]
    finally:
        _places.cache_clear()  # 8 bytes for each weight of an expert


def _answer(tracer: Tracer, question: RowQuestion, trace: Trace) -> RowAnswer:
    try:
        placements = tracer.placements(question, trace)
        found = [row for placement in placements for row in _read(placement, question)]
    except NotComparable as why:
        return RowAnswer(question.name, reason=str(why))
    except Exception as error:  # a version of vLLM that lacks what is read here
        return RowAnswer(question.name, reason=f"it cannot be read: {error!r}")
    if not found:
        return RowAnswer(question.name, elsewhere=True)
    wanted = getattr(torch, question.dtype)
    held = found[0][3].dtype
    dtype = wanted if all(_holds_exactly(values, wanted) for *_, values in found) else held
    name = str(dtype).removeprefix("torch.")
    pieces = [
        (row, begin, end, row_number(_bytes(values.to(dtype)), name))
        for row, begin, end, values in found
    ]
    return RowAnswer(question.name, name, pieces)


def _holds_exactly(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` can represent `values`: none of its numbers was rounded when loaded."""
    if dtype == values.dtype:
        return True
    try:
        if torch.promote_types(dtype, values.dtype) != values.dtype:
            return False
    except RuntimeError:  # float8 and unsigned integers are promoted to nothing
        return False
    return bool(torch.equal(values.to(dtype).to(values.dtype), values))


def _bytes(values: torch.Tensor) -> bytes:
    return bytes(octets_of(values.contiguous()).cpu().numpy())


def _read(placement: Placement, question: RowQuestion) -> list[tuple[int, int, int, torch.Tensor]]:
    """(row, first column, column after the last, values) of what was asked for and is on this
    worker.
    """
    begin = max(question.begin, placement.column)
    end = min(question.end, placement.column + placement.width)
    rows = [row for row in question.rows if 0 <= row - placement.row < placement.height]
    if begin >= end or not rows:
        return []
    held_rows = [row - placement.row + placement.held_row for row in rows]
    first = begin - placement.column + placement.held_column
    values = _values(placement, held_rows, first, first + end - begin)
    return [(row, begin, end, values[number]) for number, row in enumerate(rows)]


def _values(placement: Placement, rows: list[int], begin: int, end: int) -> torch.Tensor:
    """Shape [rows, end - begin], in the dtype that the layer computes with."""
    layer = placement.layer
    parameter = getattr(layer, placement.attribute)
    if parameter.device.type == "meta":
        raise NotComparable("a weight update is open")
    if placement.expert is not None:
        return _expert_values(layer, parameter, placement.expert, rows, begin, end)
    if placement.attribute == "weight" and is_packed(layer):
        return _packed_values(layer, rows, begin, end)
    matrix = parameter.data
    matrix = matrix.reshape(1, -1) if matrix.dim() < 2 else matrix.flatten(1)
    return matrix[rows, begin:end]


def _packed_values(layer: Any, rows: list[int], begin: int, end: int) -> torch.Tensor:
    columns = torch.arange(end - begin)
    probe = torch.zeros(end - begin, input_size(layer), dtype=layer.weight.dtype)
    probe[columns, columns + begin] = 1
    products = layer.cpu_linear(probe, layer.weight, None)[:, rows]
    if not bool(products.isfinite().all()):  # a NaN in another column shows up in this one
        raise NotComparable("the packed layer holds values that are not finite")
    return products.T


def _expert_values(
    layer: Any, parameter: Any, expert: int, rows: list[int], begin: int, end: int
) -> torch.Tensor:
    weights = parameter.data[expert]
    method = layer.quant_method
    kernel = method.moe_kernel.fused_experts
    if parameter.device.type != "cpu":
        backend = method.unquantized_backend.name
        if backend not in ("TRITON", "BATCHED_TRITON"):
            raise NotComparable(f"experts are stored as {backend} wants them")
        return weights[rows, begin:end]
    if getattr(kernel, "_use_zentorch", False):
        return weights[rows, begin:end]
    places = _places(tuple(weights.shape), weights.dtype, kernel.isa)
    return weights.reshape(-1)[places[rows, begin:end]]


@cache
def _places(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where the packing of an expert of this shape puts each element: shape [rows, columns]."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    count = shape[0] * shape[1]
    numbers = torch.arange(count).view(1, *shape)
    origin, scale = torch.zeros(count, dtype=torch.int64), 1
    while scale < count:
        digits = (numbers // scale % _DIGIT).to(dtype)
        origin += cpu_prepack_moe_weight(digits, isa).reshape(-1).to(torch.int64) * scale
        scale *= _DIGIT
    places = torch.full((count,), -1)
    within = bool(((origin >= 0) & (origin < count)).all())
    if within:
        places[origin] = numbers.view(-1)
    if not within or bool((places < 0).any()):
        raise NotComparable(f"packing for {isa} does more than reorder an expert's weights")
    return places.view(*shape)
