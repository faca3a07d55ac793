"""Tensors in the SDK's messages, as torch has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyctl.tinker import wire
from skyctl.tinker.losses import LossError

LARGEST_TENSOR = 1 << 26
"""Maximum elements of one datum's tensor: a sparse one of a few bytes may claim any shape."""


_NUMPY = {wire.FLOAT32: np.float32, wire.INT64: np.int64, wire.INT32: np.int32}


def output_message(data: Sequence[Mapping[str, Tensor]], metrics: Mapping[str, float]) -> bytes:
    """One record of named tensors per datum: their shapes may differ."""
    answer = wire.message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for tensors in data:
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        for name, value in tensors.items():
            content = value.float().contiguous().numpy().tobytes()
            field = record.fields[name]
            field.data, field.dtype = content, wire.FLOAT32
            field.offsets = np.array([0, len(content)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(value.shape[1:])
    for name, number in metrics.items():
        answer.metrics[name] = number
    return bytes(answer.SerializeToString())


def array_of(content: bytes, dtype: int) -> Any:
    try:
        if dtype == wire.BFLOAT16:
            wide = np.frombuffer(content, dtype=np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32)
        return np.frombuffer(content, dtype=_NUMPY[dtype])
    except (KeyError, ValueError) as error:
        raise LossError(f"a tensor has {len(content)} bytes of dtype {dtype}: {error}") from error


def tensor_of(name: str, message: Any) -> Tensor:
    """A dense tensor of a message; unlisted elements of a sparse one are 0."""
    shape = tuple(message.shape)
    sparse = message.WhichOneof("one") == "sparse_csr"
    content = array_of(message.sparse_csr.values if sparse else message.dense, message.dtype)
    shape = shape or (content.size,)
    if any(size < 0 for size in shape) or np.prod([float(size) for size in shape]) > LARGEST_TENSOR:
        raise LossError(f"{name} has shape {shape}: larger than {LARGEST_TENSOR} elements")
    if sparse:
        content = _dense(name, message.sparse_csr, content, shape)
    elif content.size != np.prod(shape):
        raise LossError(f"{name} has {content.size} elements for shape {shape}")
    dtype = np.int64 if name == "target_tokens" else np.float32
    if name == "target_tokens" and content.dtype.kind != "i":
        raise LossError("target_tokens must be int64")
    return torch.from_numpy(content.reshape(shape).astype(dtype))


def _dense(name: str, message: Any, values: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Any:
    rows = array_of(message.crow_indices, wire.INT64)
    columns = array_of(message.col_indices, wire.INT64)
    fits = (
        len(shape) == 2
        and len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and bool((np.diff(rows) >= 0).all())
        and (not len(columns) or 0 <= int(columns.min()) <= int(columns.max()) < shape[1])
    )
    if not fits:
        raise LossError(f"{name} is not a CSR tensor of shape {shape}")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense
