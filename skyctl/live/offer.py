"""What a trainer offers a fleet to copy from, and what it is told to sum: JSON both ways, no torch.

rank 0   Offer ─► plans ─► Offered     once, until a tensor moves or a server changes
         numbers ─► push               every time
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyctl.live.blocks import Block

if TYPE_CHECKING:
    from skyctl.live.plan import Piece, WorkerPlan
    from skyctl.wire.layouts import LayoutReport

CHANGED = "has changed since the trainer's offer"
"""In the message of a push whose servers are not those that were planned for."""


@dataclass(frozen=True)
class Offer:
    """The memory of a trainer's ranks: each of `pieces` is [*Block, export, offset], each of
    `exports` an `Export`, both by rank and as they travel.
    """

    pieces: tuple[list[Any], ...]
    exports: tuple[list[Any], ...]
    pids: tuple[int, ...] = ()
    """The processes of the ranks: when one ends, servers let go of the memory of all."""

    @property
    def key(self) -> str:
        """Identifies its content."""
        text = json.dumps([self.pieces, self.exports])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class LayoutSums:
    """What ranks sum for the workers of one layout (`live/sums.py`)."""

    layout: str
    """The layout's digest."""
    parameters: list[Any]
    """Name, dtype and shape of each parameter."""
    rows: list[Any]
    """Of each rank, its copies (`WorkerPlan.rows_by_rank`)."""


@dataclass(frozen=True)
class Offered:
    """The answer to an offer: pushes name its `key`."""

    key: str
    sums: tuple[LayoutSums, ...]

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """What one rank sums, as it travels."""
        return [
            {"layout": s.layout, "parameters": s.parameters, "rows": s.rows[rank]}
            for s in self.sums
        ]


@dataclass(frozen=True)
class Live:
    """Weights in a trainer's memory that workers copy from. Sizes in bytes."""

    key: str
    """The offer's."""
    exports: tuple[list[Any], ...] = ()
    """Of each rank, as they travel."""
    pids: tuple[int, ...] = ()
    """The processes of the ranks."""
    plans: Mapping[str, WorkerPlan] = field(default_factory=dict)
    """By layout."""
    tensors: int = 0
    """How many there are."""
    total_bytes: int = 0
    """What they come to, each once."""
    numbers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What parameters must hold after this push: by layout and name, from all ranks' sums."""

    def rows(self, layout: str) -> list[list[Any]]:
        """The exports that workers of a layout map, in the order of their chunks."""
        return [self.exports[rank][export] for rank, export in self.plans[layout].sources]

    def offered(self) -> Offered:
        """What the trainer is told."""
        sums = (
            LayoutSums(layout, list(plan.parameters), plan.rows_by_rank())
            for layout, plan in self.plans.items()
        )
        return Offered(self.key, tuple(sums))


def planned(offer: Offer, workers: Iterable[LayoutReport]) -> Live:
    """The offer with the plans of these workers. Raises as `plan_live`."""
    from skyctl.live.plan import plan_live

    ranks = [[piece_from(row) for row in rows] for rows in offer.pieces]
    plans = plan_live(ranks, workers)
    whole = {piece.block.tensor: piece.block for pieces in ranks for piece in pieces}
    total = sum(Block(b.tensor, b.dtype, b.shape, b.start, b.shape).nbytes for b in whole.values())
    return Live(offer.key, offer.exports, offer.pids, plans, len(whole), total)


def piece_row(block: Block, place: Sequence[int]) -> list[Any]:
    """A piece as it travels; `place` is its export and its first element there."""
    return [*block.to_wire(), *place]


def piece_from(row: Sequence[Any]) -> Piece:
    """Inverse of `piece_row`; a row of another form raises TypeError or ValueError."""
    from skyctl.live.plan import Piece

    *block, export, offset = row
    return Piece(Block.from_wire(block), int(export), int(offset))
