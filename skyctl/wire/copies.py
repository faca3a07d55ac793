"""Carry out the copies of a `Program`: bytes of a chunk into parameters, between GPUs or on one.

The sender uses it as well: it builds each parameter from its own chunks to number it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

import torch

from skyctl.wire.layouts import Copy

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def octets_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat view of its memory."""
    flat = tensor.detach().view(-1)
    # a single value counts as contiguous whatever its stride, and then has no view as bytes
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def copy_runs(
    copies: Iterable[Copy], chunk: torch.Tensor, parameters: dict[int, torch.Tensor]
) -> None:
    """Enqueue `copies` from `chunk` into `parameters` (by their index), all flat uint8 tensors."""
    for target, source in paired_runs(copies, chunk, parameters):
        target.copy_(source, non_blocking=True)


def paired_runs(
    copies: Iterable[Copy], chunk: torch.Tensor, parameters: dict[int, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of the destination (a view of a parameter) and the source (a view of the chunk)."""
    for copy in copies:
        target = parameters[copy.parameter]
        source_pitch = copy.source_pitch if copy.rows > 1 else copy.row
        target_pitch = copy.target_pitch if copy.rows > 1 else copy.row
        unit = gcd(
            *(copy.row, copy.source, source_pitch, copy.target, target_pitch),
            *(chunk.data_ptr(), target.data_ptr(), 8),
        )
        source_runs = _runs(chunk, copy.source, copy.rows, copy.row, source_pitch, unit)
        target_runs = _runs(target, copy.target, copy.rows, copy.row, target_pitch, unit)
        yield target_runs, source_runs


def _runs(
    octets: torch.Tensor, begin: int, rows: int, row: int, pitch: int, unit: int
) -> torch.Tensor:
    """Shape [rows, row / unit]; a run outside the tensor raises RuntimeError."""
    end = begin + (rows - 1) * pitch + row
    if begin < 0 or end > octets.numel():
        raise RuntimeError(f"a copy of bytes {begin} to {end} leaves {octets.numel()} bytes")
    words = octets[begin:end].view(_UNITS[unit])
    return words.as_strided((rows, row // unit), (pitch // unit, 1))
