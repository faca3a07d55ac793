"""The messages between a push and a server's workers: JSON bodies as dataclasses, no torch.

`ReceiverInit` opens a push, once per push and server; `ChunkUpdate` describes a chunk, the same for
every server. `RowQuestion` and `RowAnswer` are arguments and results of `WorkerMethod.DIGEST`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any
from zlib import crc32

SPIN_VARIABLE = "SKYCTL_SPIN_S"
"""Seconds that processes of a CPU server wait for each other before they sleep; set by the fleet
plan, read in the server."""
BACKEND = "skyctl"
"""Name of the weight-transfer backend that servers are started with."""

LANES = 2048
GOLDEN = -7046029254386353131
MIX = -4658895280553007687
"""Constants of the tensor numbers (`device_digest.py`): words per row, 2^64 / golden ratio as a
signed number, and a multiplier of splitmix64.
"""

_SESSION = re.compile(r"^[0-9a-f]{8,64}$")


@dataclass
class ReceiverInit:
    """How one server's workers reach the sender."""

    transport: str
    """The mechanism, by the name of its receiver's module."""
    session: str
    """Hexadecimal name of this push; shared memory carries it."""
    tensors: list[str]
    """Names of every tensor that will be sent."""
    slot_bytes: int
    """Size of the sender's buffers."""
    endpoint: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the mechanism needs (see its receiver); it may hold a secret."""

    def __post_init__(self) -> None:
        if not isinstance(self.transport, str) or not self.transport.isidentifier():
            raise ValueError(f"transport {self.transport!r} is not a name")
        if not isinstance(self.session, str) or not _SESSION.match(self.session):
            raise ValueError("session must be 8 to 64 hexadecimal digits")
        if not isinstance(self.slot_bytes, int) or self.slot_bytes < 1:
            raise ValueError(f"slot_bytes {self.slot_bytes!r} is not positive")


@dataclass
class ChunkUpdate:
    """One chunk: parallel lists over its tensors."""

    chunk: int
    """Number of the chunk, from 0."""
    slot: int
    """Number of the sender's buffer that holds it."""
    size: int
    """Bytes of the buffer that the chunk takes."""
    names: list[str]
    """Checkpoint names."""
    dtype_names: list[str]
    """Attributes of `torch`."""
    shapes: list[list[int]]
    """Sizes of each tensor."""
    offsets: list[int]
    """Byte offset of each tensor in the buffer."""
    crc32: list[int]
    """Checksum of each tensor's bytes (zlib)."""

    def __post_init__(self) -> None:
        columns = (self.names, self.dtype_names, self.shapes, self.offsets, self.crc32)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("names, dtype_names, shapes, offsets and crc32 differ in length")


DIGEST_VERSION = 5
"""How digests and tensor numbers are computed. Incremented with every change of the algorithm:
results of two versions cannot be compared. Workers of the first version report none.
"""

NOT_ON_GPU = "its model is not on a GPU"
"""Why a CPU worker has no layout."""

ROW_WIDTH = 64
"""Maximum number of columns of a tensor that one question covers."""


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of this shape."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


@dataclass
class RowQuestion:
    """Asks for parts of one checkpoint tensor, as the running model holds them.

    A tensor is treated as a matrix in row-major order: its first dimension counts rows, all others
    together columns. A tensor of one dimension is one row.
    """

    name: str
    """Checkpoint name."""
    dtype: str
    """torch's name of the checkpoint's dtype, such as `bfloat16`."""
    shape: list[int]
    """The checkpoint's shape."""
    rows: list[int]
    """Row numbers, each once."""
    begin: int
    """First column."""
    end: int
    """Column after the last; at most ROW_WIDTH after the first."""

    def __post_init__(self) -> None:
        height, width = self.matrix
        if not all(0 <= row < height for row in self.rows):
            raise ValueError(f"{self.name} has {height} rows; asked for {self.rows}")
        if not 0 <= self.begin < self.end <= min(width, self.begin + ROW_WIDTH):
            raise ValueError(
                f"{self.name} has {width} columns; asked for {self.begin} to {self.end}"
            )

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        return matrix_of(self.shape)


class TensorUse(StrEnum):
    """What a server's loader makes of a checkpoint tensor. Of several workers the first counts."""

    LOADED = "loaded"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass
class RowAnswer:
    """What one worker holds of one `RowQuestion`. Exactly one of `pieces`, `elsewhere` and `reason`
    is set.
    """

    name: str
    """Checkpoint name."""
    dtype: str = ""
    """torch's name of the dtype of the pieces' numbers: the question's, if the values survive the
    round trip, else the one that the worker holds."""
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(row, first column, column after the last, `row_number` of the values) in the checkpoint's
    coordinates. Tensor-parallel workers hold parts of the rows or of the columns. A row can occur
    twice: also in a tied output layer's copy."""
    elsewhere: bool = False
    """None of the requested parts is on this worker, but other workers hold them."""
    reason: str = ""
    """Why the worker cannot compare the tensor."""


@dataclass
class ReadTensor:
    """A checkpoint tensor that is to be read out of a running model."""

    name: str
    """Checkpoint name."""
    dtype: str
    """torch's name of the dtype: the checkpoint's, or that in which it is written."""
    shape: list[int]
    """The checkpoint's shape."""
    offset: int = 0
    """Where it begins in the file that it is written to."""


@dataclass
class TensorPart:
    """What one worker has of a checkpoint tensor. With neither `boxes` nor `reason`: nothing."""

    name: str
    """Checkpoint name."""
    dtype: str = ""
    """torch's name of the dtype that the worker holds it in."""
    boxes: list[list[int]] = field(default_factory=list)
    """(row, column, height, width) in the tensor as a matrix (see `RowQuestion`)."""
    reason: str = ""
    """Why it cannot be read."""


@dataclass
class WeightsOffer:
    """What one worker lets that of another server copy."""

    form: str = ""
    """Digest of the names, shapes, dtypes and layout of its tensors, and of its rank."""
    total_bytes: int = 0
    """Where the last of them ends in the sequence that is copied in chunks."""
    buffer_bytes: int = 0
    """The size of a chunk."""
    sources: list[list[Any]] = field(default_factory=list)
    """Its buffers, which chunks are in by turns: each an `Export`, or a file and an offset."""
    reason: str = ""
    """Why it cannot be copied from; "" if it can."""


_EXPONENTS = {"bfloat16": ("H", 0x7F80), "float32": ("I", 0x7F80_0000), "float16": ("H", 0x7FFF)}


def row_number(data: bytes, dtype: str) -> int:
    """CRC-32 of consecutive values of `dtype`, with what a processor may lose set to zero.

    Packed weights are read by multiplication, which loses the sign of zero, and in bfloat16 and
    float32 what is smaller than the smallest normal number.
    """
    if dtype in _EXPONENTS:
        code, mask = _EXPONENTS[dtype]
        words = array(code, data)
        data = array(code, [word if word & mask else 0 for word in words]).tobytes()
    return crc32(data)
