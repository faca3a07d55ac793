"""Whether tensors hold NaN or infinity, looked at where they lie.

The sender uses it as well, on what it has read into a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

EXPONENTS = {
    torch.bfloat16: 0x7F80_7F80_7F80_7F80,
    torch.float16: 0x7C00_7C00_7C00_7C00,
    torch.float32: 0x7F80_0000_7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
"""The exponents in 8 bytes of elements: all bits of one are set in NaN and infinity alone."""
_LARGEST_FP8 = {torch.float8_e5m2: 0x7B, torch.float8_e4m3fn: 0x7E}
"""For types that torch cannot reduce as numbers: the bits of the largest finite value, unsigned."""
_NAN_FP8 = {
    torch.float8_e8m0fnu: 0xFF,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e4m3fnuz: 0x80,
}
"""The same for types with a single NaN and no infinity: its bits."""


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """One boolean, still on the device."""
    if (largest := _LARGEST_FP8.get(tensor.dtype)) is not None:
        return (tensor.view(torch.uint8) & 0x7F).amax() <= largest
    if tensor.dtype in _NAN_FP8:
        return each_finite(tensor).all()
    # both propagate NaN, and need no memory beside the result
    least, most = torch.aminmax(tensor)
    return torch.isfinite(least) & torch.isfinite(most)


def finite_flags(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """`all_finite` of each, with a single wait for the device: one kernel for a tensor, where
    `all_finite` enqueues a dozen, which takes longer than to read a GPU's memory.
    """
    flags = [False] * len(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(place)
    for (dtype, _), places in groups.items():
        if dtype in _LARGEST_FP8 or dtype in _NAN_FP8:
            finite = torch.stack([all_finite(tensors[place]) for place in places])
        else:
            ends = torch.stack([end for p in places for end in torch.aminmax(tensors[p])])
            finite = torch.isfinite(ends).view(-1, 2).all(1)
        for place, flag in zip(places, finite.tolist(), strict=True):
            flags[place] = flag
    return flags


def each_finite(tensor: torch.Tensor) -> torch.Tensor:
    """One boolean per element."""
    if (largest := _LARGEST_FP8.get(tensor.dtype)) is not None:
        return (tensor.view(torch.uint8) & 0x7F) <= largest
    if (nan := _NAN_FP8.get(tensor.dtype)) is not None:
        return tensor.view(torch.uint8) != nan
    return torch.isfinite(tensor)
