"""Carry out the copies of a `Program`: bytes of a chunk into parameters, between GPUs or on one.

The sender uses it as well: it builds each parameter from its own chunks to number it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    copies: Iterable[Copy],
    chunk: torch.Tensor,
    parameters: Mapping[int, torch.Tensor],
    dtypes: Sequence[torch.dtype] = (),
) -> None:
    """Enqueue `copies` from `chunk` into `parameters`, flat uint8 tensors by their index. For
    `dtypes` see `paired_runs`.
    """
    for target, source in paired_runs(copies, chunk, parameters, dtypes):
        target.copy_(source, non_blocking=True)


def paired_runs(
    copies: Iterable[Copy],
    chunk: torch.Tensor,
    parameters: Mapping[int, torch.Tensor],
    dtypes: Sequence[torch.dtype] = (),
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of the destination (a view of a parameter) and the source (a view of the chunk).

    A chunk of elements, instead of bytes, comes with the `dtypes` of all parameters. Where they
    differ it is cast; a copy's bytes are those of the parameter's elements then.
    """
    octets = octets_of(chunk)
    for copy in copies:
        target = parameters[copy.parameter]
        rows, row = copy.rows, copy.row
        source_pitch = copy.source_pitch if rows > 1 else row
        target_pitch = copy.target_pitch if rows > 1 else row
        dtype = dtypes[copy.parameter] if dtypes else chunk.dtype
        if dtype == chunk.dtype:
            unit = gcd(
                *(row, copy.source, source_pitch, copy.target, target_pitch),
                *(octets.data_ptr(), target.data_ptr(), 8),
            )
            source_runs = _runs(octets, copy.source, rows, row, source_pitch, _UNITS[unit])
            target_runs = _runs(target, copy.target, rows, row, target_pitch, _UNITS[unit])
        else:
            item, own = dtype.itemsize, chunk.dtype.itemsize
            begin, size, pitch = (n // item * own for n in (copy.source, row, source_pitch))
            source_runs = _runs(octets, begin, rows, size, pitch, chunk.dtype)
            target_runs = _runs(target, copy.target, rows, row, target_pitch, dtype)
        yield target_runs, source_runs


def cut_copy(copy: Copy, size: int) -> Iterator[Copy]:
    """The copy in parts of about `size` bytes, cut where words end in the parameter."""
    if copy.rows > 1:
        each = max(1, size // max(copy.row, copy.target_pitch))
        for run in range(0, copy.rows, each):
            source = copy.source + run * copy.source_pitch
            target = copy.target + run * copy.target_pitch
            yield replace(copy, rows=min(each, copy.rows - run), source=source, target=target)
        return
    for begin in range(0, copy.row, size):
        row = min(size, copy.row - begin)
        yield replace(copy, row=row, source=copy.source + begin, target=copy.target + begin)


def _runs(
    octets: torch.Tensor, begin: int, rows: int, row: int, pitch: int, dtype: torch.dtype
) -> torch.Tensor:
    """Shape [rows, elements of `dtype`]; a run outside the tensor raises RuntimeError."""
    end = begin + (rows - 1) * pitch + row
    if begin < 0 or end > octets.numel():
        raise RuntimeError(f"a copy of bytes {begin} to {end} leaves {octets.numel()} bytes")
    elements, unit = octets[begin:end].view(dtype), dtype.itemsize
    return elements.as_strided((rows, row // unit), (pitch // unit, 1))
