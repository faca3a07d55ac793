"""What a push and the engine inside vLLM say to each other: JSON bodies as dataclasses, no torch.

`ReceiverInit` travels as init_info of /init_weight_transfer_engine, once per push and server;
`ChunkUpdate` as update_info of /update_weights, once per chunk, the same for every server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

SPIN_VARIABLE = "SKYCTL_SPIN_S"
"""Seconds that processes of a CPU server wait for each other before they sleep; read by
`engines/vllm/inside/idle.py`, set by the fleet plan."""
BACKEND = "skyctl"
"""Name of the weight-transfer backend that servers are started with."""

BLOCK_WORDS = 4 * 1024 * 1024
GOLDEN = -7046029254386353131
MIX = -4658895280553007687
MASK = (1 << 64) - 1
"""Constants of the tensor numbers (`device_digest.py`), which both sides compute: words per block
(32 MiB: the product of a block stays in the GPU's cache), 2^64 / golden ratio as a signed number,
and a multiplier of splitmix64."""

_STEP = 1000003

_SESSION = re.compile(r"^[0-9a-f]{8,64}$")


def following_factor(factor: int) -> int:
    """The odd number of the next block of a tensor; that of the first is 1."""
    return factor * _STEP & 0x7FFF_FFFF_FFFF_FFFF | 1


@dataclass
class ReceiverInit:
    """How one server's workers reach the sender.

    Attributes:
        transport: mechanism, the name of a module in `engine/receivers`.
        session: hexadecimal name of this push; shared memory and the group carry it.
        tensors: names of every tensor that will be sent.
        slot_bytes: size of the sender's buffers.
        endpoint: what the mechanism needs (see its receiver).
    """

    transport: str
    session: str
    tensors: list[str]
    slot_bytes: int
    endpoint: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.transport, str) or not self.transport.isidentifier():
            raise ValueError(f"transport {self.transport!r} is no name")
        if not isinstance(self.session, str) or not _SESSION.match(self.session):
            raise ValueError("session must be 8 to 64 hexadecimal digits")
        if not isinstance(self.slot_bytes, int) or self.slot_bytes < 1:
            raise ValueError(f"slot_bytes {self.slot_bytes!r} is not positive")


@dataclass
class ChunkUpdate:
    """One chunk: parallel lists over its tensors.

    Attributes:
        chunk: number of the chunk, from 0.
        slot: number of the sender's buffer that holds it.
        size: bytes of the buffer that the chunk takes.
        names: checkpoint names.
        dtype_names: attributes of `torch`.
        shapes: sizes.
        offsets: byte offset of each tensor in the buffer.
        crc32: checksum of each tensor's bytes (zlib).
    """

    chunk: int
    slot: int
    size: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    crc32: list[int]

    def __post_init__(self) -> None:
        counts = {
            len(column)
            for column in (
                self.names,
                self.dtype_names,
                self.shapes,
                self.offsets,
                self.crc32,
            )
        }
        if len(counts) != 1:
            raise ValueError("names, dtype_names, shapes, offsets and crc32 differ in length")
