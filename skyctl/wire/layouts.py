"""How a running model's parameters are made of checkpoint tensors: JSON both ways, no torch. Rows
are a class's fields in their order, so a new order is a new version of the format.

A worker reports one `ParameterLayout` per parameter. The push plans from these which bytes of a
chunk go where, and sends each worker a `Program`: what to copy into its parameters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.wire.messages import DIGEST_VERSION

LAYOUT_VERSION = f"4.{DIGEST_VERSION}"
"""Version of this format, and of the numbers by which parameters are compared with what was sent. A
worker with another version is pushed to by vLLM's loader, a sender with another refuses a push.
"""


Runs = tuple[int, int, int, int, int, int]
"""rows, row, source, source_pitch, target, target_pitch: as in a `Part`."""


@dataclass(frozen=True)
class Part:
    """A block of one checkpoint tensor inside a parameter. Counted in elements, both row-major."""

    tensor: str
    """Checkpoint name."""
    shape: tuple[int, ...]
    """The shape it must have in the checkpoint."""
    rows: int
    """Number of runs of elements in the block."""
    row: int
    """Elements per run."""
    source: int
    """First element in the tensor."""
    source_pitch: int
    """From one run to the next in the tensor."""
    target: int
    """First element in the parameter."""
    target_pitch: int
    """From one run to the next in the parameter."""

    @property
    def runs(self) -> Runs:
        """Its block, without the tensor."""
        place = (self.source, self.source_pitch, self.target, self.target_pitch)
        return (self.rows, self.row, *place)

    def to_wire(self) -> list[Any]:
        return [*vars(self).values()]


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter of a worker's model."""

    name: str
    """The parameter's name in the running model."""
    dtype: str
    """torch's name of its dtype."""
    shape: tuple[int, ...]
    """Its sizes."""
    parts: tuple[Part, ...] = ()
    """The blocks that cover it once, except for zero padding."""
    zeros: int = 0
    """Number of elements of zero padding."""
    reason: str = ""
    """Why only the engine's loader can fill it; it has no parts then."""
    processed: bool = False
    """Whether the layer is loaded with this parameter, and makes of it what it computes with."""

    def to_wire(self) -> list[Any]:
        row = {**vars(self), "parts": [part.to_wire() for part in self.parts]}
        return [*row.values()]

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> ParameterLayout:
        """Inverse of `to_wire`; a row of another form raises TypeError or ValueError."""
        name, dtype, shape, parts, zeros, reason, processed = row
        read = tuple(
            Part(str(tensor), tuple(map(int, sizes)), *map(int, numbers))
            for tensor, sizes, *numbers in parts
        )
        own = tuple(map(int, shape))
        return cls(str(name), str(dtype), own, read, int(zeros), str(reason), bool(processed))


def layout_digest(parameters: Iterable[ParameterLayout]) -> str:
    """Identifies a layout: equal for workers whose parameters are made of the same tensors in the
    same way.
    """
    text = json.dumps([LAYOUT_VERSION, [parameter.to_wire() for parameter in parameters]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Copy:
    """Bytes of one chunk that go into one parameter. Pitches are meaningless for a single run."""

    chunk: int
    """Number of the chunk."""
    parameter: int
    """Index in `Program.parameters`."""
    rows: int
    """Number of runs."""
    row: int
    """Bytes per run."""
    source: int
    """First byte in the chunk."""
    source_pitch: int
    """Bytes from one run to the next in the chunk."""
    target: int
    """First byte in the parameter."""
    target_pitch: int
    """Bytes from one run to the next in the parameter."""

    def to_wire(self) -> list[int]:
        return [*vars(self).values()]


@dataclass(frozen=True)
class Program:
    """All that one worker copies in a push.

    `layout` is the digest of the worker's report that it was planned from; `parameters` are (name,
    dtype, shape). Together the copies fill every parameter, except for padding.
    """

    layout: str
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    copies: tuple[Copy, ...]

    def to_wire(self) -> dict[str, Any]:
        copies = [copy.to_wire() for copy in self.copies]
        return {"version": LAYOUT_VERSION, **vars(self), "copies": copies}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Program:
        """Inverse of `to_wire`; another version raises ValueError."""
        if (version := data.get("version")) != LAYOUT_VERSION:
            raise ValueError(f"a program of version {version}, not {LAYOUT_VERSION}")
        return cls(
            data["layout"],
            tuple((name, dtype, tuple(shape)) for name, dtype, shape in data["parameters"]),
            tuple(Copy(*row) for row in data["copies"]),
        )


@dataclass(frozen=True)
class LayoutReport:
    """One worker's description of its model."""

    rank: int
    """The worker's number within its server, from 0."""
    layout: str = ""
    """`layout_digest` of the parameters."""
    parameters: tuple[ParameterLayout, ...] = ()
    """Empty if the asker has them under their digest."""
    proven: tuple[str, ...] = ()
    """Digests of layouts that were compared, byte for byte, with what the engine's loader made in
    this very process."""
    ignored: tuple[str, ...] = ()
    """Checkpoint tensors that the loader skips."""
    reason: str = ""
    """Why there is no layout."""
    spare_bytes: int = 0
    """Memory that it takes to process parameters beside the running ones."""
    opened: str = ""
    """The key of the trainer's exports that it has mapped, with a program that still fits."""
    stages: bool = False
    """Whether it copies these beside its parameters first."""

    def to_wire(self) -> dict[str, Any]:
        parameters = [parameter.to_wire() for parameter in self.parameters]
        return {"version": LAYOUT_VERSION, **vars(self), "parameters": parameters}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> LayoutReport:
        """Inverse of `to_wire`; another version comes back as a report with a `reason`."""
        if data["version"] != LAYOUT_VERSION:
            reason = f"it speaks version {data['version']} of layouts, not {LAYOUT_VERSION}"
            return cls(int(data["rank"]), reason=reason)
        return cls(
            int(data["rank"]),
            str(data["layout"]),
            tuple(ParameterLayout.from_wire(row) for row in data["parameters"]),
            tuple(map(str, data["proven"])),
            tuple(map(str, data["ignored"])),
            str(data["reason"]),
            int(data["spare_bytes"]),
            str(data["opened"]),
            bool(data["stages"]),
        )
