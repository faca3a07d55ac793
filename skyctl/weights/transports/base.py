"""What a transport is: the parent's half shapes payloads, the sender's half moves bytes.

One module per mechanism holds both: `TRANSPORT` (used by the push, imports no torch) and
`open_carrier` (used inside the sender process). A new mechanism is one such module, its name in
`choose.py`, and a receiver in `engine/receivers` unless vLLM brings one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from skyctl.control.dialects import Dialect
from skyctl.engine.wire import ChunkUpdate, ReceiverInit
from skyctl.weights.dtypes import torch_name
from skyctl.weights.plan import Chunk, ChunkPlan, Packing


@dataclass(frozen=True)
class Filled:
    """A chunk that lies in a slot of the sender. `crc32` has one checksum per tensor; `extra` is
    what the carrier adds (such as memory handles)."""

    chunk: int
    slot: int
    crc32: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """One attempt at carrying a plan over. `endpoint` is what the sender said of itself;
    `world_size` counts the sender and every worker."""

    name: str
    plan: ChunkPlan
    world_size: int
    endpoint: Mapping[str, Any]


class Transport(Protocol):
    """The parent's half. `collective`: sender and servers must act at the same time, both at init
    (the sender joins) and at each update (it sends); one that fails takes the others with it."""

    name: str
    collective: bool
    packing: Packing
    alignment: int

    def sender_options(
        self, world_size: int, *, rendezvous_timeout_s: float, update_timeout_s: float
    ) -> dict[str, Any]:
        """What the carrier is opened with."""

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        """init_info of one server, whose first worker has rank `rank_offset`."""

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, dialect: Dialect
    ) -> dict[str, Any]:
        """update_info of one chunk."""


class Carrier(Protocol):
    """The sender's half: owns the slots and moves them."""

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        """Writable memory of every slot. It is filled again and again: page faults are dear."""

    def endpoint(self) -> dict[str, Any]:
        """What servers need to reach this process."""

    def join(self) -> None:
        """Form the group with the servers; returns when it is complete. Bounded by its deadline."""

    def send(self, slot: int, size: int) -> None:
        """Send the first `size` bytes of a slot; returns when the slot may be refilled."""

    def close(self) -> None:
        """Free everything."""


def chunk_update(chunk: Chunk, filled: Filled) -> dict[str, Any]:
    """update_info of skyctl's own engine (`engine/wire.py`)."""
    tensors = [placed.tensor for placed in chunk.placed]
    return asdict(
        ChunkUpdate(
            chunk=chunk.index,
            slot=filled.slot,
            size=chunk.size,
            names=[tensor.name for tensor in tensors],
            dtype_names=[torch_name(tensor.dtype, tensor.name) for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
            offsets=[placed.offset for placed in chunk.placed],
            crc32=list(filled.crc32),
        )
    )


def receiver_init(transport: str, session: Session, endpoint: dict[str, Any]) -> dict[str, Any]:
    """init_info of skyctl's own engine (`engine/wire.py`)."""
    return asdict(
        ReceiverInit(
            transport=transport,
            session=session.name,
            tensors=[tensor.name for tensor in session.plan.tensors],
            slot_bytes=session.plan.slot_bytes,
            endpoint=endpoint,
        )
    )
