"""Which part of each tensor a trainer's ranks have: plain data, JSON both ways, no torch.

A rank reports a `Block` for each part of a Hugging Face tensor that lies in its memory. Together
the blocks of all ranks must be the model that the servers run: `refuse_unlike` says where they are
not. Several ranks may have the same block; `senders` chooses between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.checkpoints.header import DTYPE_BITS, safetensors_name
from skyctl.errors import PreflightError
from skyctl.units import count_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a block begins in its tensor, and its sizes."""


@dataclass(frozen=True)
class Target:
    """A tensor of the model that the servers run."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def to_wire(self) -> list[Any]:
        return [*vars(self).values()]

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> Target:
        """Inverse of `to_wire`; a row of another form raises TypeError or ValueError."""
        name, dtype, shape = row
        return cls(str(name), str(dtype), tuple(map(int, shape)))


@dataclass(frozen=True)
class Block:
    """A box of a tensor, row-major and without gaps in the memory of its rank."""

    tensor: str
    """The tensor's Hugging Face name."""
    dtype: str
    """torch's name of the dtype that it is sent as."""
    shape: tuple[int, ...]
    """The sizes of the whole tensor."""
    start: tuple[int, ...]
    """Where the box begins in it, in each dimension."""
    size: tuple[int, ...]
    """The sizes of the box."""

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        """Its bytes as they are sent."""
        return self.elements * DTYPE_BITS[safetensors_name(self.dtype, self.tensor)] // 8

    @property
    def box(self) -> Box:
        return self.start, self.size

    @property
    def fits(self) -> bool:
        """Whether the box lies in the tensor."""
        if not len(self.start) == len(self.size) == len(self.shape):
            return False
        edges = zip(self.start, self.size, self.shape, strict=True)
        return all(0 <= start <= start + count <= whole for start, count, whole in edges)

    def to_wire(self) -> list[Any]:
        return [*vars(self).values()]

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> Block:
        """Inverse of `to_wire`; a row of another form raises TypeError or ValueError."""
        tensor, dtype, *sizes = row
        shape, start, size = (tuple(map(int, numbers)) for numbers in sizes)
        return cls(str(tensor), str(dtype), shape, start, size)


Ranks = Sequence[Sequence[Block]]
"""The blocks of each rank, in order of their ranks."""


def described(ranks: Ranks) -> list[Target]:
    """The tensors of which the ranks have parts, as the first rank that has a part describes each.
    They stand for those of the servers where these are unknown.
    """
    targets: dict[str, Target] = {}
    for blocks in ranks:
        for block in blocks:
            targets.setdefault(block.tensor, Target(block.tensor, block.dtype, block.shape))
    return list(targets.values())


def refuse_unlike(ranks: Ranks, targets: Iterable[Target]) -> None:
    """Raise PreflightError, naming tensor and rank, unless the blocks are exactly these tensors:
    each element in a single box, sent as a single dtype.
    """
    expected = {target.name: target for target in targets}
    boxes: dict[str, dict[Box, list[int]]] = {name: {} for name in expected}
    dtypes: dict[str, tuple[str, int]] = {}
    for rank, blocks in enumerate(ranks):
        for block in blocks:
            _refuse_other(rank, block, expected.get(block.tensor))
            boxes[block.tensor].setdefault(block.box, []).append(rank)
            dtype, first = dtypes.setdefault(block.tensor, (block.dtype, rank))
            if dtype != block.dtype:
                raise PreflightError(
                    f"rank {first} sends {block.tensor} as {dtype}, rank {rank} as {block.dtype}"
                )
    for target in expected.values():
        _refuse_gaps(target, boxes[target.name])


def _refuse_other(rank: int, block: Block, target: Target | None) -> None:
    """Raise PreflightError unless the block is a part of the tensor that the servers run."""
    if target is None:
        raise PreflightError(
            f"rank {rank} sends {block.tensor}, which is not in the model the servers run",
            hint="leave it out, or give its name there: names={…}",
        )
    if block.shape != target.shape:
        raise PreflightError(
            f"rank {rank} sends {block.tensor} as {list(block.shape)}, the servers run "
            f"{list(target.shape)}"
        )
    if not block.fits:
        raise PreflightError(
            f"rank {rank} sends {block.tensor}{_indexed(block.box)}, which reaches beyond its "
            f"shape {list(block.shape)}"
        )


def _refuse_gaps(target: Target, boxes: Mapping[Box, Sequence[int]]) -> None:
    """Raise PreflightError unless the boxes, each with its ranks, cover the tensor."""
    if not boxes:
        raise PreflightError(
            f"no rank sends {target.name}, which the servers run",
            hint="if it has another name in the trainer, give that: names={…}",
        )
    for first, second in _overlapping(boxes):
        raise PreflightError(
            f"{target.name}: rank {boxes[first][0]} sends {_indexed(first)} and rank "
            f"{boxes[second][0]} sends {_indexed(second)}, which overlap without being the same"
        )
    covered = sum(math.prod(size) for _, size in boxes)
    if covered < math.prod(target.shape):
        ranks = sorted({rank for sending in boxes.values() for rank in sending})
        listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
        raise PreflightError(
            f"{target.name}: {count_of(len(ranks), 'rank')} ({listed}) send {covered} of its "
            f"{math.prod(target.shape)} elements"
        )


def _overlapping(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes that have an element in common.

    A sweep along the dimension that cuts the tensor most often, so that a shard meets only its
    neighbours.
    """
    starts = [start for start, _ in boxes]
    cuts = [len(set(column)) for column in zip(*starts, strict=True)]
    if not cuts:
        return
    axis = cuts.index(max(cuts))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        active = [other for other in active if other[0][axis] + other[1][axis] > box[0][axis]]
        yield from ((other, box) for other in active if _overlap(other, box))
        active.append(box)


def _overlap(first: Box, second: Box) -> bool:
    edges = zip(*first, *second, strict=True)
    return all(max(a, b) < min(a + length, b + width) for a, length, b, width in edges)


def senders(ranks: Ranks) -> list[list[Block]]:
    """Of blocks that several ranks have, leave each to a single rank, so that the ranks send about
    the same number of bytes. Large blocks are given out first.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    blocks: dict[tuple[str, Box], Block] = {}
    for rank, own in enumerate(ranks):
        for block in own:
            if block.elements:
                key = (block.tensor, block.box)
                holders.setdefault(key, []).append(rank)
                blocks[key] = block
    sent = [0] * len(ranks)
    chosen: list[list[Block]] = [[] for _ in ranks]
    # those with a single rank first: they are no choice
    order = sorted(blocks, key=lambda key: (len(holders[key]) > 1, -blocks[key].nbytes))
    for key in order:
        rank = min(holders[key], key=lambda rank: sent[rank])
        sent[rank] += blocks[key].nbytes
        chosen[rank].append(blocks[key])
    return chosen


def _indexed(box: Box) -> str:
    """A box as Python indexes it: `[0:4, 8:16]`."""
    spans = (f"{begin}:{begin + count}" for begin, count in zip(*box, strict=False))
    return f"[{', '.join(spans)}]"
