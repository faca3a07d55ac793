"""Pieces of parameters that lie in every way: strided, cut within words, not where words begin."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import strategies as st

from skyctl.live.blocks import Block
from skyctl.live.plan import Piece
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, layout_digest

PARAMETERS = [
    ("columns", "bfloat16", (40, 96)),
    ("long", "bfloat16", (9001,)),
    ("late", "bfloat16", (64, 8)),
    ("odd", "bfloat16", (30, 7)),
    ("ends", "bfloat16", (10,)),
    ("wide", "bfloat16", (2, 5000)),
]
"""Name, dtype and shape."""

COPIES = [
    (0, 0, 40, 64, 32, 192, 128, 192),  # columns of a matrix into columns of another
    (1, 1, 1, 17992, 0, 17992, 10, 17992),  # begins and ends within a word
    (1, 2, 1, 1024, 18002, 1024, 0, 1024),  # does not begin where a word does
    (0, 3, 30, 6, 2, 14, 4, 14),  # every run is cut within words
    (0, 4, 1, 6, 200, 6, 10, 6),  # less than a word
    (1, 5, 2, 8800, 8, 9600, 160, 10_000),  # runs that the kernel sums by rows of lanes
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


Box = tuple[tuple[int, ...], tuple[int, ...]]


def report(*parameters: ParameterLayout, ignored: tuple[str, ...] = ()) -> LayoutReport:
    return LayoutReport(0, layout_digest(parameters), parameters, ignored=ignored)


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    """The boxes between these cuts of each dimension."""
    edges = [[0, *sorted(set(cut)), size] for cut, size in zip(cuts, shape, strict=True)]
    spans = [[(a, b - a) for a, b in pairwise(e) if b > a] for e in edges]
    return [(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in product(*spans)]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[tuple[int, ...], list[tuple[Box, list[int]]]]]:
    """Shape, and boxes with their ranks, of some tensors that four ranks share in any way."""
    made = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        cuts = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
        owners = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
        made[name] = (shape, [(box, draw(owners)) for box in grid(shape, cuts)])
    return made


@st.composite
def parts(draw: st.DrawFn, name: str, shape: tuple[int, ...], target: int) -> Part:
    """Some of a tensor, as a parameter has it side by side."""
    size = math.prod(shape)
    height, width = (shape[0], size // shape[0]) if len(shape) > 1 else (1, size)
    if draw(st.booleans()):
        begin = draw(st.integers(0, size - 1))
        count = draw(st.integers(1, size - begin))
        return Part(name, shape, 1, count, begin, count, target, count)
    column = draw(st.integers(0, width - 1))
    count = draw(st.integers(1, width - column))
    top = draw(st.integers(0, height - 1))
    rows = draw(st.integers(1, height - top))
    return Part(name, shape, rows, count, top * width + column, width, target, count)


def in_memory(
    shared: dict[str, tuple[tuple[int, ...], list[tuple[Box, list[int]]]]], together: bool
) -> tuple[list[list[Piece]], dict[tuple[int, int], Any], dict[str, Any]]:
    """Every rank's pieces, the bytes of their exports, and the whole tensors. `together`: a rank
    has all its blocks in one export, with something between them."""
    np = pytest.importorskip("numpy")
    drawn = np.random.default_rng(1)
    full = {
        name: drawn.integers(0, 0xEE, (*shape, 2)).astype(np.uint8)
        for name, (shape, _) in shared.items()
    }
    ranks: list[list[Piece]] = [[] for _ in range(4)]
    memory: list[list[Any]] = [[] for _ in range(4)]
    for name, (shape, boxes) in shared.items():
        for (start, size), owners in boxes:
            at = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            for rank in owners:
                block = Block(name, "bfloat16", shape, start, size)
                offset = sum(part.size for part in memory[rank]) // 2 + 1 if together else 0
                export = 0 if together else len(memory[rank])
                ranks[rank].append(Piece(block, export, offset))
                gap = [np.zeros(2, np.uint8)] if together else []
                memory[rank] += [*gap, full[name][at].reshape(-1)]
    exports = {
        (rank, number): octets
        for rank, arrays in enumerate(memory)
        for number, octets in enumerate([np.concatenate(arrays)] if together and arrays else arrays)
    }
    return ranks, exports, full
