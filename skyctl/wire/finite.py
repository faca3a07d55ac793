"""Whether tensors hold NaN or infinity, looked at where they lie.

The sender uses it as well, on what it has read into a GPU.
"""

from __future__ import annotations

import torch

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


def each_finite(tensor: torch.Tensor) -> torch.Tensor:
    """One boolean per element."""
    if (largest := _LARGEST_FP8.get(tensor.dtype)) is not None:
        return (tensor.view(torch.uint8) & 0x7F) <= largest
    if (nan := _NAN_FP8.get(tensor.dtype)) is not None:
        return tensor.view(torch.uint8) != nan
    return torch.isfinite(tensor)
