"""The numbers of `device_digest.py` by one kernel for all tensors, instead of several for each.

A digest is made while servers are frozen, and hundreds of launches take longer than reading memory.
Each program of the kernel sums one run of words; a table says which tensor, and which position in
it. Integer sums do not depend on their order, so they can be gathered with atomics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from skyctl.engines.vllm.inside.wire import BLOCK_WORDS, GOLDEN, MIX, following_factor

_RUN_WORDS = 1024 * 1024  # a divisor of BLOCK_WORDS
_TILE_WORDS = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _sum_runs(addresses, words, places, factors, targets, sums, GOLDEN, MIX, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    run = tl.program_id(0)
    source = tl.load(addresses + run).to(tl.pointer_type(tl.int64))
    count = tl.load(words + run)
    first = tl.load(places + run)
    lanes = tl.arange(0, TILE).to(tl.int64)
    total = tl.zeros((TILE,), dtype=tl.int64)
    for begin in range(0, count, TILE):
        at = begin + lanes
        values = tl.load(source + at, mask=at < count, other=0)
        mixed = (first + at + 1) * GOLDEN
        mixed = mixed ^ (mixed >> 29)
        total += values * ((mixed * MIX) | 1)
    result = tl.sum(total, axis=0) * tl.load(factors + run)
    tl.atomic_add(sums + tl.load(targets + run), result)


def sum_words(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number per tensor, shape [len(tensors)], int64, on the tensors' GPU, which must be the
    current one.

    Every tensor must be contiguous, begin at a multiple of 8 bytes and hold a multiple of 8 bytes.
    The first call in a process compiles the kernel.
    """
    device = tensors[0].device
    rows = [row for number, tensor in enumerate(tensors) for row in _runs(number, tensor)]
    table = torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    _sum_runs[(len(rows),)](*table, sums, GOLDEN, MIX, TILE=_TILE_WORDS, num_warps=8)
    return sums


def _runs(number: int, tensor: torch.Tensor) -> list[tuple[int, int, int, int, int]]:
    """Address, words, position of the first in its block, factor of the block, tensor's number."""
    address, left = tensor.data_ptr(), tensor.numel() * tensor.element_size() // 8
    rows, at, factor = [], 0, 1
    while left:
        take = min(left, _RUN_WORDS)
        rows.append((address + at * 8, take, at % BLOCK_WORDS, factor, number))
        at, left = at + take, left - take
        if at % BLOCK_WORDS == 0:
            factor = following_factor(factor)
    return rows
