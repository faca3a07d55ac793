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

from skyctl.checkpoints.header import DTYPE_BITS, safetensors_name
from skyctl.errors import PreflightError
from skyctl.live.blocks import Block, Box
from skyctl.live.runs import overlap, span, split
from skyctl.transfer.plan import NotInLayout, copy_of, merged
from skyctl.wire.layouts import Copy, LayoutReport, ParameterLayout, Part, Program

SPLIT_BYTES = 8 << 20
"""Of a block that several ranks have, each gives a part of at least this size."""

Place = int
"""An export of a rank: its number there × the number of ranks + the rank."""
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


class _Template(NamedTuple):
    """The copies of parameters that are alike. `Row.chunk` is a number of `_Filled.places`."""

    rows: list[Row]
    """By that number, and within it in the order of the parameter."""
    taken: list[tuple[int, int]]
    """The numbers in `rows`, and how many bytes are copied from each."""


class _Filled(NamedTuple):
    """How a parameter is filled."""

    parameter: int
    """Its number."""
    template: _Template
    """Its copies."""
    places: Sequence[Place]
    """The exports that these number."""


@dataclass(frozen=True)
class WorkerPlan:
    """All that workers of one layout copy. Chunk k is export k of `sources`."""

    layout: str
    """The digest of the workers' layout."""
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each parameter."""
    filled: tuple[_Filled, ...]
    """How each parameter is filled."""
    ranks: int
    """How many the trainer has."""

    @cached_property
    def _chunks(self) -> dict[Place, int]:
        chunks: dict[Place, int] = {}
        for _, template, places in self.filled:
            for local, _ in template.taken:
                chunks.setdefault(places[local], len(chunks))
        return chunks

    @property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """The exports that are copied from: a rank, and the number of one of its exports."""
        return tuple((place % self.ranks, place // self.ranks) for place in self._chunks)

    @cached_property
    def rows(self) -> list[Row]:
        """The copies, by chunk. Bytes are those of the parameter's dtype, also in an export of
        another.
        """
        chunks = self._chunks
        rows = [
            (chunks[places[row[0]]], number, *row[2:])
            for number, template, places in self.filled
            for row in template.rows
        ]
        rows.sort(key=itemgetter(0))  # stable: within an export in the model's order
        return rows

    @cached_property
    def program(self) -> Program:
        """The copies as a worker takes them."""
        return Program(self.layout, self.parameters, tuple(Copy(*row) for row in self.rows))

    def rows_by_rank(self) -> list[list[Row]]:
        """Of each rank the copies out of it, whose chunks are the numbers of its exports."""
        rows: list[list[Row]] = [[] for _ in range(self.ranks)]
        for number, template, places in self.filled:
            for row in template.rows:
                export, rank = divmod(places[row[0]], self.ranks)
                rows[rank].append((export, number, *row[2:]))
        for one_rank in rows:
            one_rank.sort(key=itemgetter(0))
        return rows

    def bytes_by_rank(self) -> dict[int, int]:
        """How much one such worker copies out of each rank."""
        sent: dict[int, int] = {}
        for _, template, places in self.filled:
            for local, count in template.taken:
                rank = places[local] % self.ranks
                sent[rank] = sent.get(rank, 0) + count
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
    planner = _Planner(tensors, len(ranks))
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
    them."""

    block: Block
    sources: tuple[_Source, ...]
    spans: list[tuple[int, int]]
    """Of each box, its first element in the tensor and the one after its last. The same list for
    all tensors that are cut alike."""
    kind: int
    """Equal for tensors that are cut alike."""


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
            boxes.setdefault((block.start, block.size), []).append(
                (export * len(ranks) + rank, offset)
            )
    cuts: dict[object, tuple[list[tuple[int, int]], int]] = {}
    sent = [0] * len(ranks)
    tensors = {}
    for name, boxes in boxes_of.items():
        item = _item(blocks[name].dtype)
        chosen = tuple(
            [_Source(box, _share_out(box, owners, item, sent)) for box, owners in boxes.items()]
        )
        shape = blocks[name].shape
        key = (shape, *boxes, *[len(source.owners) for source in chosen])
        if (cut := cuts.get(key)) is None:
            cut = cuts[key] = ([span(shape, box) for box in boxes], len(cuts))
        tensors[name] = _Tensor(blocks[name], chosen, *cut)
    return tensors


def _share_out(
    box: Box, owners: list[tuple[Place, int]], item: int, sent: list[int]
) -> tuple[tuple[Place, int], ...]:
    """Of the ranks that have a box, those that give a part of it. `sent` counts their bytes."""
    size, count = math.prod(box[1]) * item, 1
    if len(owners) > 1:
        count = min(len(owners), max(1, size // SPLIT_BYTES))
        owners = sorted(owners, key=lambda owner: sent[owner[0] % len(sent)])[:count]
    for place, _ in owners:
        sent[place % len(sent)] += size // count
    return tuple(owners)


@cache
def _item(dtype: str) -> int:
    """Bytes per element."""
    return max(1, DTYPE_BITS[safetensors_name(dtype, "a block")] // 8)


class _Planner:
    """Plans worker after worker, and remembers what parameters that are alike come to."""

    def __init__(self, tensors: Mapping[str, _Tensor], ranks: int) -> None:
        self._tensors = tensors
        self._ranks = ranks
        self._templates: dict[object, _Template] = {}
        self._combined: dict[tuple[str, ...], tuple[int, list[Place]]] = {}
        self._kinds: dict[object, int] = {}

    def plan(self, worker: LayoutReport) -> WorkerPlan:
        filled = []
        for number, parameter in enumerate(worker.parameters):
            if parameter.reason:
                raise NotInLayout(f"{parameter.name}: {parameter.reason}")
            filled.append(_Filled(number, *self._copies(parameter)))
        described = tuple((p.name, p.dtype, p.shape) for p in worker.parameters)
        return WorkerPlan(worker.layout, described, tuple(filled), self._ranks)

    def _copies(self, parameter: ParameterLayout) -> tuple[_Template, list[Place]]:
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
) -> _Template:
    """A parameter's copies; chunks are numbers of exports within the parameter."""
    copies: list[Copy] = []
    filled = 0
    for part, tensor in zip(parameter.parts, cuts, strict=True):
        item = _item(tensor.block.dtype)
        end = part.source + (part.rows - 1) * part.source_pitch + part.row
        for source, (first, last) in zip(tensor.sources, tensor.spans, strict=True):
            if last <= part.source or first >= end:
                continue
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
    rows: list[Row] = [(*vars(copy).values(),) for copy in merged(copies)]
    taken: dict[int, int] = {}
    for row in rows:
        taken[row[0]] = taken.get(row[0], 0) + row[2] * row[3]
    return _Template(rows, [*taken.items()])
