"""Pure planning of a live push: from what each rank of a trainer has in memory, and how workers'
parameters are made, which bytes each worker copies out of which rank. Nothing is gathered.

A rank exports the memory of its tensors (`wire/exports.py`); a `Piece` is a block of a Hugging Face
tensor in it. To a worker, the exports that it copies from are the chunks of its `Program`, so that
what carries out a push from files carries out this one (`wire/copies.py`).

Layers that are alike are planned once: a parameter's copies follow from the geometry of its parts
and of the pieces that they meet, and only the exports differ between layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import itemgetter
from typing import NamedTuple

from skyctl.checkpoints.dtypes import DTYPE_BITS, safetensors_name
from skyctl.errors import PreflightError
from skyctl.live.blocks import Block, Box
from skyctl.live.runs import overlap, split
from skyctl.transfer.plan import NotInLayout, copy_of, merged
from skyctl.wire.layouts import Copy, LayoutReport, ParameterLayout, Part, Program

SPLIT_BYTES = 8 << 20
"""Of a block that several ranks have, each gives a part of at least this size."""

Place = tuple[int, int]
"""A rank, and the number of one of its exports."""
Row = tuple[int, int, int, int, int, int, int, int]
"""A `Copy` as it travels."""


class Piece(NamedTuple):
    """A block, and where its rank has it: `offset` elements into its export `export`."""

    block: Block
    export: int
    offset: int = 0


class _Source(NamedTuple):
    """A box of a tensor, and the ranks that give a part of it each: (place, offset in it)."""

    box: Box
    owners: tuple[tuple[Place, int], ...]


class _Filled(NamedTuple):
    """A parameter's number, its copies, and the chunk of each export that these name."""

    parameter: int
    template: list[Row]
    chunks: dict[int, int]


@dataclass(frozen=True)
class WorkerPlan:
    """All that workers of one layout copy. Chunk k is export k of `sources`."""

    layout: str
    """The digest of the workers' layout."""
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each parameter."""
    sources: tuple[Place, ...]
    """The exports that are copied from."""
    filled: tuple[_Filled, ...]
    """How each parameter is filled."""

    @cached_property
    def rows(self) -> list[Row]:
        """The copies, by chunk. Bytes are those of the parameter's dtype, also in an export of
        another.
        """
        rows = [
            (chunks[row[0]], number, *row[2:])
            for number, template, chunks in self.filled
            for row in template
        ]
        rows.sort(key=itemgetter(0))  # stable: within an export in the model's order
        return rows

    @cached_property
    def program(self) -> Program:
        """The copies as a worker takes them."""
        return Program(self.layout, self.parameters, tuple(Copy(*row) for row in self.rows))

    def rows_of(self, rank: int) -> list[Row]:
        """The copies out of one rank, whose chunks are the numbers of that rank's exports."""
        exports = {
            chunk: export for chunk, (owner, export) in enumerate(self.sources) if owner == rank
        }
        return [(exports[row[0]], *row[1:]) for row in self.rows if row[0] in exports]

    def bytes_by_rank(self) -> dict[int, int]:
        """How much one such worker copies out of each rank."""
        sent: dict[int, int] = {}
        for _, template, chunks in self.filled:
            for row in template:
                rank = self.sources[chunks[row[0]]][0]
                sent[rank] = sent.get(rank, 0) + row[2] * row[3]
        return sent


def plan_live(
    ranks: Sequence[Sequence[Piece]], workers: Iterable[LayoutReport]
) -> dict[str, WorkerPlan]:
    """The plan of each layout among the workers, by its digest.

    The blocks must be checked (`refuse_unlike`): the boxes of a tensor cover it once.

    Raises:
        NotInLayout: a worker has parameters that only its engine's loader can fill.
        PreflightError: trainer and servers do not fit each other.
    """
    tensors = _sources(ranks)
    planner = _Planner(tensors)
    plans: dict[str, WorkerPlan] = {}
    used: set[str] = set()
    ignored: set[str] = set()
    for worker in workers:
        ignored.update(worker.ignored)
        if worker.reason:
            raise NotInLayout(worker.reason)
        if worker.layout not in plans:
            plans[worker.layout] = planner.plan(worker)
            used.update(part.tensor for p in worker.parameters for part in p.parts)
    if unused := sorted(tensors.keys() - used - ignored):
        raise PreflightError(
            f"the trainer has {unused[0]}, of which the servers make no parameter "
            f"({len(unused)} such tensors)",
            hint="leave them out, or give their names there: names={…}",
        )
    return plans


def balance(sent: Mapping[int, int], ranks: int) -> float:
    """The most that a rank sends, divided by the mean of all; 1.0 is even."""
    total = sum(sent.values())
    return max(sent.values()) * ranks / total if total else 1.0


class _Tensor(NamedTuple):
    """A tensor of the trainer's: its shape and dtype, and its boxes with the ranks that give
    them. `kind` is equal for tensors that are cut alike."""

    block: Block
    sources: tuple[_Source, ...]
    kind: int


def _sources(ranks: Sequence[Sequence[Piece]]) -> dict[str, _Tensor]:
    """Every tensor, with ranks chosen among those that have the same box so that all send about
    the same number of bytes.
    """
    boxes_of: dict[str, dict[Box, list[tuple[Place, int]]]] = {}
    blocks: dict[str, Block] = {}
    for rank, pieces in enumerate(ranks):
        for block, export, offset in pieces:
            if not math.prod(block.size):
                continue
            blocks.setdefault(block.tensor, block)
            boxes = boxes_of.setdefault(block.tensor, {})
            boxes.setdefault((block.start, block.size), []).append(((rank, export), offset))
    kinds: dict[object, int] = {}
    sent = [0] * len(ranks)
    tensors = {}
    for name, boxes in boxes_of.items():
        item = _item(blocks[name].dtype)
        chosen = tuple(
            [_Source(box, _share_out(box, owners, item, sent)) for box, owners in boxes.items()]
        )
        cut = (blocks[name].shape, *boxes, *[len(source.owners) for source in chosen])
        tensors[name] = _Tensor(blocks[name], chosen, kinds.setdefault(cut, len(kinds)))
    return tensors


def _share_out(
    box: Box, owners: list[tuple[Place, int]], item: int, sent: list[int]
) -> tuple[tuple[Place, int], ...]:
    """Of the ranks that have a box, those that give a part of it. `sent` counts their bytes."""
    size, count = math.prod(box[1]) * item, 1
    if len(owners) > 1:
        count = min(len(owners), max(1, size // SPLIT_BYTES))
        owners = sorted(owners, key=lambda owner: sent[owner[0][0]])[:count]
    for (rank, _), _ in owners:
        sent[rank] += size // count
    return tuple(owners)


@cache
def _item(dtype: str) -> int:
    """Bytes per element."""
    return max(1, DTYPE_BITS[safetensors_name(dtype, "a block")] // 8)


class _Planner:
    """Plans worker after worker, and remembers what parameters that are alike come to."""

    def __init__(self, tensors: Mapping[str, _Tensor]) -> None:
        self._tensors = tensors
        self._templates: dict[object, list[Row]] = {}
        self._combined: dict[tuple[str, ...], tuple[int, list[Place]]] = {}
        self._kinds: dict[object, int] = {}

    def plan(self, worker: LayoutReport) -> WorkerPlan:
        chunks: dict[Place, int] = {}
        filled = []
        for number, parameter in enumerate(worker.parameters):
            if parameter.reason:
                raise NotInLayout(f"{parameter.name}: {parameter.reason}")
            template, places = self._copies(parameter)
            used = {row[0]: 0 for row in template}
            for local in used:
                used[local] = chunks.setdefault(places[local], len(chunks))
            filled.append(_Filled(number, template, used))
        described = tuple((p.name, p.dtype, p.shape) for p in worker.parameters)
        return WorkerPlan(worker.layout, described, tuple(chunks), tuple(filled))

    def _copies(self, parameter: ParameterLayout) -> tuple[list[Row], list[Place]]:
        """A parameter's copies, and the exports that these number."""
        tensors = [_tensor_of(part, parameter, self._tensors) for part in parameter.parts]
        kind, places = self._combine(tensors)
        geometry = tuple(part.runs for part in parameter.parts)
        key = (parameter.dtype, parameter.shape, parameter.zeros, geometry, kind)
        template = self._templates.get(key)
        if template is None:
            exports = {place: number for number, place in enumerate(places)}
            template = self._templates[key] = _template(parameter, tensors, exports)
        return template, places

    def _combine(self, tensors: Sequence[_Tensor]) -> tuple[int, list[Place]]:
        """A number that is equal where tensors are cut alike and lie alike in as many exports, and
        these exports.
        """
        names = tuple(tensor.block.tensor for tensor in tensors)
        combined = self._combined.get(names)
        if combined is None:
            exports: dict[Place, int] = {}
            lie = tuple(
                (exports.setdefault(place, len(exports)), offset)
                for tensor in tensors
                for source in tensor.sources
                for place, offset in source.owners
            )
            key = (tuple(tensor.kind for tensor in tensors), lie)
            kind = self._kinds.setdefault(key, len(self._kinds))
            combined = self._combined[names] = (kind, list(exports))
        return combined


def _tensor_of(part: Part, parameter: ParameterLayout, tensors: Mapping[str, _Tensor]) -> _Tensor:
    tensor = tensors.get(part.tensor)
    if tensor is None:
        raise PreflightError(
            f"no rank of the trainer has {part.tensor}, of which the servers make {parameter.name}",
            hint="if it has another name in the trainer, give that: names={…}",
        )
    block = tensor.block
    if block.shape != part.shape or block.dtype != parameter.dtype:
        raise PreflightError(
            f"the trainer has {part.tensor} as {block.dtype} {list(block.shape)}, the servers run "
            f"{parameter.dtype} {list(part.shape)}"
        )
    return tensor


def _template(
    parameter: ParameterLayout, cuts: Sequence[_Tensor], exports: Mapping[Place, int]
) -> list[Row]:
    """A parameter's copies; chunks are numbers of exports within the parameter."""
    copies: list[Copy] = []
    filled = 0
    for part, tensor in zip(parameter.parts, cuts, strict=True):
        item = _item(tensor.block.dtype)
        for source in tensor.sources:
            for common in overlap(part, tensor.block.shape, source.box):
                filled += common[0] * common[1]
                for (place, offset), piece in zip(
                    source.owners, split(common, len(source.owners), item), strict=False
                ):
                    copies.append(copy_of(exports[place], 0, offset * item, item, piece))
    expected = math.prod(parameter.shape) - parameter.zeros
    if filled != expected:
        raise PreflightError(
            f"{parameter.name}: the trainer's ranks have {filled} of its {expected} elements"
        )
    copies.sort(key=lambda copy: (copy.chunk, copy.target))
    return [(*vars(copy).values(),) for copy in merged(copies)]
