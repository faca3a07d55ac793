"""Pieces of parameters that lie in every way: strided, cut within words, not where words begin."""

from __future__ import annotations

from typing import Any

PARAMETERS = [
    ("columns", "bfloat16", (40, 96)),
    ("long", "bfloat16", (9001,)),
    ("late", "bfloat16", (64, 8)),
    ("odd", "bfloat16", (30, 7)),
    ("ends", "bfloat16", (10,)),
]
"""Name, dtype and shape."""

COPIES = [
    (0, 0, 40, 64, 32, 192, 128, 192),  # columns of a matrix into columns of another
    (1, 1, 1, 17992, 0, 17992, 10, 17992),  # begins and ends within a word
    (1, 2, 1, 1024, 18002, 1024, 0, 1024),  # does not begin where a word does
    (0, 3, 30, 6, 2, 14, 4, 14),  # every run is cut within words
    (0, 4, 1, 6, 200, 6, 10, 6),  # less than a word
]
"""Rows of a plan."""


def exports(dtype: str, *, broken: bool, device: str = "cpu") -> list[Any]:
    """Two flat tensors of 10,000 elements; `broken`: with NaN among what is copied."""
    import torch

    draw = torch.Generator().manual_seed(7)
    made = [torch.randn(10_000, generator=draw).to(getattr(torch, dtype)) for _ in range(2)]
    if broken:
        made[0][16 + 96 * 5] = torch.nan
        made[1][9001 + 300] = torch.inf
    return [tensor.to(device) for tensor in made]
