"""What a trainer offers a fleet, and what it is told to sum, or to send: JSON both ways, no torch.

rank 0   Offer ─► plans ─► Offered     once, until a tensor moves or a server changes
         numbers ─► push               every time
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.header import Tensor, safetensors_name
from skyctl.live.blocks import Block
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, layout_digest

if TYPE_CHECKING:
    from skyctl.live.plan import Piece, WorkerPlan

IPC, GLOO, NCCL = "ipc", "gloo", "nccl"
"""How weights leave the ranks' memory: servers map it, or ranks send it point to point, between
CPUs or between GPUs."""

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
    """The processes of the ranks, 0 for one of another machine: when one ends, servers let go of
    the memory of all.
    """
    transport: str = IPC
    """How servers get at it."""

    @property
    def key(self) -> str:
        """Identifies its content."""
        text = json.dumps([self.pieces, self.exports, self.transport])
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
    """Names the offer."""
    sums: tuple[LayoutSums, ...]
    """What ranks sum, and send to the workers of each layout."""
    workers: tuple[str, ...] = ()
    """The layouts of all workers, in the order of their places in the group."""
    machine: str = ""
    """The address of a machine that servers run on; "" if all are on this one."""
    update_timeout_s: float = 0.0
    """How long a transfer may take."""
    unkept: str = ""
    """Why no server could write the fleet's copy of what was copied; "" if one could."""

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """What one rank sums, as it travels; `senders` have something to send."""
        return [
            {
                "layout": s.layout,
                "parameters": s.parameters,
                "rows": s.rows[rank],
                "senders": sum(map(bool, s.rows)),
            }
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
    """The processes of the ranks, 0 for one of another machine."""
    plans: Mapping[str, WorkerPlan] = field(default_factory=dict)
    """By layout."""
    tensors: int = 0
    """How many there are."""
    total_bytes: int = 0
    """What they come to, each once."""
    numbers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What parameters must hold after this push: by layout and name, from all ranks' sums."""
    transport: str = IPC
    """How servers get at the weights."""
    servers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The layouts of each server's workers, in the fleet's order."""
    machine: str = ""
    """The address of a machine that servers run on; "" if all are on this one."""
    update_timeout_s: float = 0.0
    """How long a transfer may take."""
    group: Mapping[str, Any] | None = None
    """Where the members of this push's group meet (`wire/peer_group.py`); None by IPC."""
    forms: bool = False
    """The group has to form: no member is in it yet."""

    @property
    def mapped_key(self) -> str:
        """What workers know the memory, or the group, by."""
        return f"{self.key}-{self.group['name']}" if self.group else self.key

    def rows(self, layout: str) -> list[list[Any]]:
        """What workers of a layout map, in the order of their chunks: exports, or the rank and the
        number of each if ranks send."""
        sources = self.plans[layout].sources
        if self.transport != IPC:
            return [[rank, export] for rank, export in sources]
        return [self.exports[rank][export] for rank, export in sources]

    def place(self, server: str) -> int:
        """The place of a server's first worker in the group."""
        workers = 0
        for name, layouts in self.servers.items():
            if name == server:
                break
            workers += len(layouts)
        return workers + len(self.pids)

    def with_push(
        self,
        numbers: Mapping[str, Mapping[str, int]],
        group: Mapping[str, Any] | None,
        *,
        forms: bool,
    ) -> Live:
        """The offer as one push takes it."""
        return replace(self, numbers=numbers, group=group, forms=forms)

    def tensors_of(self, layout: str) -> list[Tensor]:
        """The parameters of a layout as tensors of a checkpoint (`whole_tensors`)."""
        blocks = (
            Block(name, dtype, shape, (), shape)
            for name, dtype, shape in self.plans[layout].parameters
        )
        return [
            Tensor(b.tensor, safetensors_name(b.dtype, b.tensor), b.shape, 0, 0, b.nbytes)
            for b in blocks
        ]

    def offered(self, *, unkept: str = "") -> Offered:
        """What the trainer is told; `unkept` as there."""
        sums = (
            LayoutSums(layout, list(plan.parameters), plan.rows_by_rank())
            for layout, plan in self.plans.items()
        )
        workers = (layout for layouts in self.servers.values() for layout in layouts)
        return Offered(
            *(self.key, tuple(sums), tuple(workers)),
            *(self.machine, self.update_timeout_s, unkept),
        )


def planned(offer: Offer, workers: Iterable[LayoutReport]) -> Live:
    """The offer with the plans of these workers. Raises as `plan_live`."""
    from skyctl.live.plan import plan_live

    ranks = [[piece_from(row) for row in rows] for rows in offer.pieces]
    plans = plan_live(ranks, workers)
    whole = {piece.block.tensor: piece.block for pieces in ranks for piece in pieces}
    total = sum(Block(b.tensor, b.dtype, b.shape, b.start, b.shape).nbytes for b in whole.values())
    return Live(
        *(offer.key, offer.exports, offer.pids, plans, len(whole), total),
        transport=offer.transport,
    )


def whole_tensors(offer: Offer, rank: int) -> LayoutReport:
    """The layout of a worker whose engine's loader takes the trainer's tensors as they are."""
    parameters: dict[str, ParameterLayout] = {}
    for rows in offer.pieces:
        for row in rows:
            block = piece_from(row).block
            count = math.prod(block.shape)
            part = Part(block.tensor, block.shape, 1, count, 0, count, 0, count)
            parts = (part,) if count else ()
            parameters.setdefault(
                block.tensor, ParameterLayout(block.tensor, block.dtype, block.shape, parts)
            )
    layout = layout_digest(parameters.values())
    return LayoutReport(rank, layout, tuple(parameters.values()), (layout,))


def piece_row(block: Block, place: Sequence[int]) -> list[Any]:
    """A piece as it travels; `place` is its export and its first element there."""
    return [*block.to_wire(), *place]


def piece_from(row: Sequence[Any]) -> Piece:
    """Inverse of `piece_row`; a row of another form raises TypeError or ValueError."""
    from skyctl.live.plan import Piece

    *block, export, offset = row
    return Piece(Block.from_wire(block), int(export), int(offset))
