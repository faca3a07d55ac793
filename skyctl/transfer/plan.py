"""Pure planning: a checkpoint's tensors become ordered chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyctl.checkpoints.dtypes import DTYPE_BITS
from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError

ALIGNMENT = 64
"""Alignment of a tensor in a chunk, in bytes, so that a view of it is aligned for any dtype."""

Packing = Literal["fit", "overflow", "bucket"]
"""`fit`: a chunk never exceeds the chunk size, but a larger tensor gets a chunk of its own.
`overflow`: a chunk is closed by the tensor that makes it exceed the chunk size, the rule by which
vLLM's packed NCCL consumer cuts (packed_tensor.py), so producer and consumer agree.
`bucket`: as `fit`, and a chunk without padding is closed where the next tensor would not be aligned
for its dtype: SGLang's workers take views of the buffer that they receive (tensor_bucket.py).
"""

_EMBEDDING = re.compile(r"(^|\.)(embed\w*|\w*embeddings?|wte|wpe)\.")
_FUSED = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "query": ("qkv", 0),
    "key": ("qkv", 1),
    "value": ("qkv", 2),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "w1": ("w13", 0),
    "w3": ("w13", 1),
}
"""Projections that vLLM loads into one fused layer, and their order in it."""


@dataclass(frozen=True)
class Placed:
    """A tensor at byte `offset` of its chunk."""

    tensor: Tensor
    offset: int


@dataclass(frozen=True)
class Chunk:
    """The content of one update. `size` is the bytes it takes in a slot, padding included."""

    index: int
    placed: tuple[Placed, ...]
    size: int

    @property
    def payload_bytes(self) -> int:
        return sum(placed.tensor.nbytes for placed in self.placed)


@dataclass(frozen=True)
class ChunkPlan:
    """All chunks of a checkpoint, in the order they are sent. Sizes in bytes.

    `grown` names the tensors that are larger than `chunk_size` and got larger chunks.
    """

    chunks: tuple[Chunk, ...]
    chunk_size: int
    grown: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(chunk.payload_bytes for chunk in self.chunks)

    @property
    def slot_bytes(self) -> int:
        """Bytes a buffer needs to hold any of the chunks."""
        return max(chunk.size for chunk in self.chunks)

    @property
    def largest(self) -> Tensor:
        return max(self.tensors, key=lambda tensor: tensor.nbytes)

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor, in sending order."""
        return [placed.tensor for chunk in self.chunks for placed in chunk.placed]


def order_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Embeddings, then layers ascending, then the rest.

    Within a layer, tensors that vLLM fuses into one module are adjacent, and so are a layer's
    experts: its layerwise loader then holds one module's tensors at a time (vllm#48644 for what
    happens otherwise). Independent of the input order.
    """
    return sorted(tensors, key=lambda tensor: _order_key(tensor.name))


def _order_key(name: str) -> tuple[Any, ...]:
    parts = name.split(".")
    stack = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if stack is None:
        section = 0 if _EMBEDDING.search(name) else 2
        return (section, (), -1, tuple(_part_key(part) for part in parts), name)
    inner = tuple(_part_key(part) for part in parts[stack + 1 :])
    return (1, tuple(parts[:stack]), int(parts[stack]), inner, name)


def _part_key(part: str) -> tuple[int, int, str, int]:
    """Sorts numbers before words, numbers by value, fused projections under their common name."""
    if part.isdecimal():
        return (0, int(part), "", 0)
    fused, order = _FUSED.get(part, (part, 0))
    return (1, 0, fused, order)


def module_of(name: str) -> str:
    """The module that vLLM loads this tensor into: fused projections, and all experts of a layer,
    count as one.
    """
    parts = name.split(".")[:-1]
    stack = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    expert = next((i for i, p in enumerate(parts) if i > stack and p.isdecimal()), len(parts))
    return ".".join(_FUSED.get(part, (part, 0))[0] for part in parts[:expert])


def _element_bytes(tensor: Tensor) -> int:
    return max(1, DTYPE_BITS[tensor.dtype] // 8)


def plan_chunks(
    tensors: Sequence[Tensor],
    chunk_size: int,
    *,
    packing: Packing = "fit",
    alignment: int = ALIGNMENT,
    order: Callable[[Sequence[Tensor]], list[Tensor]] = order_tensors,
) -> ChunkPlan:
    """Cut the ordered tensors into chunks of `chunk_size` bytes.

    Every tensor is in exactly one chunk. One without bytes has none of its own: receivers refuse an
    empty chunk. `alignment` 1 packs without padding, as vLLM's packed wire format requires.

    Raises:
        PreflightError: there is nothing to send, or the chunk size is not positive.
    """
    if chunk_size < 1:
        raise PreflightError(f"a chunk size of {chunk_size} bytes is too small")
    if not any(tensor.nbytes for tensor in tensors):
        raise PreflightError("the checkpoint's tensors hold no bytes")
    chunks: list[Chunk] = []
    placed: list[Placed] = []
    size = 0

    def flush() -> None:
        nonlocal placed, size
        if placed:
            chunks.append(Chunk(len(chunks), tuple(placed), size))
        placed, size = [], 0

    ordered = order(tensors)
    for tensor in ordered:
        offset = -(-size // alignment) * alignment
        full = packing != "overflow" and tensor.nbytes and offset + tensor.nbytes > chunk_size
        if size and (full or (packing == "bucket" and offset % _element_bytes(tensor))):
            flush()
            offset = 0
        placed.append(Placed(tensor, offset))
        size = offset + tensor.nbytes
        if packing == "overflow" and size > chunk_size:
            flush()
    flush()
    grown = tuple(tensor.name for tensor in ordered if tensor.nbytes > chunk_size)
    return ChunkPlan(tuple(chunks), chunk_size, grown)
