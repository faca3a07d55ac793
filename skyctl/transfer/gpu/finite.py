"""Scan a chunk on a GPU for NaN and infinity: one pass over it, one wait per chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from skyctl.checkpoints.dtypes import torch_name
from skyctl.transfer.reader import Piece

_LARGEST_FP8 = {"F8_E5M2": 0x7B, "F8_E4M3": 0x7E}
"""For types that torch cannot reduce as numbers: the bits of the largest finite value, unsigned."""


def first_not_finite(chunk: torch.Tensor, pieces: Sequence[Piece]) -> tuple[Piece, int] | None:
    """The first tensor that holds NaN or infinity, and the number of the element; None if there is
    none. `chunk` is the slot's bytes (uint8) on any device; pieces without a dtype are skipped.
    """
    runs = list(_runs(pieces))
    if not runs:
        return None
    good = torch.stack([_all_finite(_bytes_of(chunk, run), run[0].dtype) for run in runs]).tolist()
    for run in (run for run, finite in zip(runs, good, strict=True) if not finite):
        for piece in run:
            finite = _finite(_bytes_of(chunk, [piece]), piece.dtype)
            if not bool(finite.all()):
                return piece, int((~finite).nonzero()[0])
    return None


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Tensors of one type that follow each other without a gap: the bytes in gaps are undefined."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if not piece.dtype or not piece.nbytes:
            continue
        last = run[-1] if run else None
        if last and (last.dtype, last.offset + last.nbytes) != (piece.dtype, piece.offset):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _bytes_of(chunk: torch.Tensor, run: Sequence[Piece]) -> torch.Tensor:
    part = chunk[run[0].offset : run[-1].offset + run[-1].nbytes]
    # packed without padding, a tensor may begin anywhere
    return part.clone() if part.data_ptr() % 8 else part


def _all_finite(part: torch.Tensor, dtype: str) -> torch.Tensor:
    """One boolean, still on the device."""
    if dtype in _LARGEST_FP8:
        return (part & 0x7F).amax() <= _LARGEST_FP8[dtype]
    # both propagate NaN, and need no memory beside the result
    least, most = torch.aminmax(part.view(getattr(torch, torch_name(dtype, ""))))
    return torch.isfinite(least) & torch.isfinite(most)


def _finite(part: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype in _LARGEST_FP8:
        return (part & 0x7F) <= _LARGEST_FP8[dtype]
    return torch.isfinite(part.view(getattr(torch, torch_name(dtype, ""))))
