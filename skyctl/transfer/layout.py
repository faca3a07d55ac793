"""Pure planning of a push in the runtime layout: what workers report becomes copy programs.

A worker reports which blocks of checkpoint tensors its parameters are made of
(`engines/vllm/inside/layout_wire.py`). This determines the best order in which to send tensors,
with fused ones side by side, and for each worker the bytes of each chunk that go into each
parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skyctl.checkpoints.dtypes import torch_name
from skyctl.checkpoints.header import Tensor
from skyctl.engines.vllm.inside.layout_wire import (
    Copy,
    LayoutReport,
    ParameterLayout,
    Part,
    Program,
)
from skyctl.transfer.plan import ChunkPlan


@dataclass(frozen=True)
class NotInLayout(Exception):
    """These workers can only be pushed to by vLLM's loader; `reason` is one line."""

    reason: str


def check_layouts(workers: Sequence[LayoutReport], tensors: Sequence[Tensor]) -> None:
    """Check that the reports are complete, and describe this checkpoint.

    Raises:
        NotInLayout: a parameter needs vLLM's loader, or tensors and parameters do not match.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    used: set[str] = set()
    for worker in workers:
        if worker.reason:
            raise NotInLayout(worker.reason)
        for parameter in worker.parameters:
            _check_parameter(parameter, by_name)
            used.update(part.tensor for part in parameter.parts)
    ignored = {name for worker in workers for name in worker.ignored}
    if unused := sorted(by_name.keys() - used - ignored):
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
    for held in parameters.values():
        for parameter in held:
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
        found = []
        for part in parameter.parts:
            chunk, offset, tensor = places[part.tensor]
            count = 1
            for extent in tensor.shape:
                count *= extent
            found.append(_copy(part, number, chunk, offset, tensor.nbytes // max(count, 1)))
        copies += merged(sorted(found, key=lambda copy: (copy.chunk, copy.target)))
    copies.sort(key=lambda copy: copy.chunk)  # stable: within a chunk in the model's order
    return Program(
        worker.layout,
        tuple((p.name, p.dtype, p.shape) for p in worker.parameters),
        tuple(copies),
    )


def _copy(part: Part, parameter: int, chunk: int, offset: int, item: int) -> Copy:
    whole = part.rows == 1 or part.source_pitch == part.target_pitch == part.row
    rows, row = (1, part.rows * part.row) if whole else (part.rows, part.row)
    return Copy(
        chunk,
        parameter,
        rows,
        row * item,
        offset + part.source * item,
        (row if whole else part.source_pitch) * item,
        part.target * item,
        (row if whole else part.target_pitch) * item,
    )


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
