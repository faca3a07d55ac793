"""Pure planning of a push: tensors become ordered chunks, which become copy programs for workers.

The programs are for pushes in the runtime layout. A worker reports which blocks of checkpoint
tensors its parameters are made of (`wire/layouts.py`). This determines the best
order in which to send tensors, with fused ones side by side, and for each worker the bytes of each
chunk that go into each parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyctl.checkpoints.header import DTYPE_BITS, Tensor, torch_name
from skyctl.errors import PreflightError
from skyctl.wire.layouts import (
    Copy,
    LayoutReport,
    ParameterLayout,
    Program,
    Runs,
)

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

    # first those without bytes: behind others they would take what aligning them takes
    ordered = sorted(order(tensors), key=lambda tensor: tensor.nbytes > 0)
    for tensor in ordered:
        offset = -(-size // alignment) * alignment
        full = packing != "overflow" and offset + tensor.nbytes > chunk_size
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


@dataclass(eq=False)  # not frozen: what it passes through sets its traceback
class NotInLayout(Exception):
    """These workers can only be pushed to by vLLM's loader; `reason` is one line."""

    reason: str


class LacksTensors(NotInLayout):
    """Parameters are made of tensors that the checkpoint lacks, and of all that it has: names mean
    the same to both.
    """


def check_layouts(workers: Sequence[LayoutReport], tensors: Sequence[Tensor]) -> None:
    """Check that the reports are complete, and describe this checkpoint.

    Raises:
        NotInLayout: a parameter needs vLLM's loader, or tensors and parameters do not match.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    if reason := next((worker.reason for worker in workers if worker.reason), ""):
        raise NotInLayout(reason)
    parameters = [parameter for worker in workers for parameter in worker.parameters]
    used = {part.tensor: parameter.name for parameter in parameters for part in parameter.parts}
    ignored = {name for worker in workers for name in worker.ignored}
    unused = sorted(by_name.keys() - used.keys() - ignored)
    if not unused and (absent := sorted(used.keys() - by_name.keys() - ignored)):
        raise LacksTensors(
            f"{used[absent[0]]} is made of {absent[0]}, which is not there "
            f"({len(absent)} such tensors)"
        )
    for parameter in parameters:
        _check_parameter(parameter, by_name)
    if unused:
        raise NotInLayout(f"no parameter is made of {unused[0]} ({len(unused)} such tensors)")


def _check_parameter(parameter: ParameterLayout, by_name: dict[str, Tensor]) -> None:
    if parameter.reason:
        raise NotInLayout(f"{parameter.name}: {parameter.reason}")
    for part in parameter.parts:
        tensor = by_name.get(part.tensor)
        if tensor is None:
            raise NotInLayout(f"{parameter.name} is made of {part.tensor}, which is not there")
        dtype = torch_name(tensor.dtype, tensor.name)
        if dtype != parameter.dtype:
            raise NotInLayout(f"{part.tensor} is {dtype}, {parameter.name} is {parameter.dtype}")
        if tuple(tensor.shape) != part.shape:
            raise NotInLayout(
                f"{part.tensor} has shape {list(tensor.shape)}, {parameter.name} wants "
                f"{list(part.shape)}"
            )
    _check_cover(parameter)


def _check_cover(parameter: ParameterLayout) -> None:
    """Check that parts follow each other within the parameter; the gap is padding at the end."""
    size = 1
    for extent in parameter.shape:
        size *= extent
    filled = 0
    for part in sorted(parameter.parts, key=lambda part: part.target):
        extent = 1
        for length in part.shape:
            extent *= length
        last = part.source + (part.rows - 1) * part.source_pitch + part.row
        side_by_side = part.rows == 1 or part.target_pitch == part.row
        if part.target != filled or last > extent or not side_by_side:
            raise NotInLayout(f"{parameter.name}: its parts do not lie one after another")
        filled += part.rows * part.row
    if filled + parameter.zeros != size:
        raise NotInLayout(f"{parameter.name}: {size - filled} elements of it are not described")


def order_for_runtime(workers: Sequence[LayoutReport], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor once, in the order in which parameters hold them; within a parameter, the first
    worker's part comes first. Tensors that no parameter is made of come last.
    """
    parameters: dict[str, list[ParameterLayout]] = {}
    for worker in workers:
        for parameter in worker.parameters:
            parameters.setdefault(parameter.name, []).append(parameter)
    by_name = {tensor.name: tensor for tensor in tensors}
    ordered: dict[str, Tensor] = {}
    for names in parameters.values():
        for parameter in names:
            for part in sorted(parameter.parts, key=lambda part: part.target):
                ordered.setdefault(part.tensor, by_name[part.tensor])
    return [*ordered.values(), *(t for t in tensors if t.name not in ordered)]


def program_for(worker: LayoutReport, plan: ChunkPlan) -> Program:
    """What this worker copies out of the plan's chunks. Call `check_layouts` first."""
    places = {
        placed.tensor.name: (chunk.index, placed.offset, placed.tensor)
        for chunk in plan.chunks
        for placed in chunk.placed
    }
    copies: list[Copy] = []
    for number, parameter in enumerate(worker.parameters):
        pieces = []
        for part in parameter.parts:
            chunk, offset, tensor = places[part.tensor]
            item = tensor.nbytes // max(math.prod(tensor.shape), 1)
            pieces.append(copy_of(chunk, number, offset, item, part.runs))
        copies += merged(sorted(pieces, key=lambda copy: (copy.chunk, copy.target)))
    copies.sort(key=lambda copy: copy.chunk)  # stable: within a chunk in the model's order
    return Program(
        worker.layout,
        tuple((p.name, p.dtype, p.shape) for p in worker.parameters),
        tuple(copies),
    )


def copy_of(chunk: int, parameter: int, offset: int, item: int, runs: Runs) -> Copy:
    """A block of a tensor at byte `offset` of a chunk, of `item` bytes an element."""
    rows, row, source, source_pitch, target, target_pitch = runs
    if rows > 1 and source_pitch == target_pitch == row:
        rows, row = 1, rows * row
    if rows == 1:
        source_pitch = target_pitch = row
    numbers = (row, source, source_pitch, target, target_pitch)
    row, source, source_pitch, target, target_pitch = (number * item for number in numbers)
    return Copy(chunk, parameter, rows, row, offset + source, source_pitch, target, target_pitch)


def merged(copies: Iterable[Copy]) -> list[Copy]:
    """The same bytes in fewer copies. Input: one parameter's, sorted by chunk and target."""
    runs: list[Copy] = []
    for copy in copies:
        if copy.rows * copy.row == 0:
            continue
        joined = _joined(runs[-1], copy) if runs else None
        if joined is None:
            runs.append(copy)
        else:
            runs[-1] = joined
    return runs


def _joined(a: Copy, b: Copy) -> Copy | None:
    """One copy instead of two consecutive ones, or None."""
    source, target = b.source - a.source, b.target - a.target
    if a.chunk != b.chunk:
        return None
    if a.rows == b.rows == 1 and source == target == a.row:
        row = a.row + b.row
        return Copy(a.chunk, a.parameter, 1, row, a.source, row, a.target, row)
    source_pitch, target_pitch = (
        (a.source_pitch, a.target_pitch) if a.rows > 1 else (source, target)
    )
    if a.row != b.row or source_pitch < a.row or target_pitch < a.row:
        return None
    follows = source == a.rows * source_pitch and target == a.rows * target_pitch
    alike = b.rows == 1 or (b.source_pitch, b.target_pitch) == (source_pitch, target_pitch)
    if not (follows and alike):
        return None
    rows = a.rows + b.rows
    return Copy(a.chunk, a.parameter, rows, a.row, a.source, source_pitch, a.target, target_pitch)
