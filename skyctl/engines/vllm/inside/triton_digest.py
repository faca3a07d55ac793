"""The numbers of `device_digest.py` by one kernel for all tensors, instead of several for each.

A digest is made while servers are frozen, and hundreds of launches take longer than reading memory.
Each program of the kernel sums one run of words; a table says which tensor, and which position in
it. Integer sums do not depend on their order, so they can be gathered with atomics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from skyctl.engines.vllm.inside.wire import BLOCK_WORDS, GOLDEN, MIX, following_factor

_RUN_WORDS = 1024 * 1024  # a divisor of BLOCK_WORDS
_TILE_WORDS = 2048


@triton.jit
def _factors(positions, GOLDEN, MIX):  # type: ignore[no-untyped-def]
    mixed = (positions + 1) * GOLDEN
    mixed = mixed ^ (mixed >> 29)
    return (mixed * MIX) | 1


@triton.jit  # type: ignore[untyped-decorator]
def _sum_runs(  # type: ignore[no-untyped-def]
    addresses, words, tails, places, factors, targets, sums, GOLDEN, MIX, BLOCK, TILE: tl.constexpr
):
    run = tl.program_id(0)
    address = tl.load(addresses + run)
    source = address.to(tl.pointer_type(tl.int64))
    count = tl.load(words + run)
    first = tl.load(places + run)
    lanes = tl.arange(0, TILE).to(tl.int64)
    total = tl.zeros((TILE,), dtype=tl.int64)
    for begin in range(0, count, TILE):
        at = begin + lanes
        values = tl.load(source + at, mask=at < count, other=0)
        total += values * _factors(first + at, GOLDEN, MIX)
    result = tl.sum(total, axis=0) * tl.load(factors + run)
    tail = tl.load(tails + run)
    if tail:
        last = tl.arange(0, 8).to(tl.int64)
        octets = (address + count * 8).to(tl.pointer_type(tl.uint8))
        rest = tl.load(octets + last, mask=last < tail, other=0).to(tl.int64)
        result += tl.sum(rest * _factors(BLOCK - tail + last, GOLDEN, MIX), axis=0)
    tl.atomic_add(sums + tl.load(targets + run), result)


def sum_words(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number per tensor, shape [len(tensors)], int64, on the tensors' GPU, which must be the
    current one.

    Every tensor must be contiguous, begin at a multiple of 8 bytes and hold at least one. The first
    call in a process compiles the kernel.
    """
    device = tensors[0].device
    places = tuple(
        (tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors
    )
    table = _table(places, device)
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    grid = (table.shape[1],)
    _sum_runs[grid](*table, sums, GOLDEN, MIX, BLOCK_WORDS, TILE=_TILE_WORDS, num_warps=8)
    return sums


@lru_cache(maxsize=2)  # a model is summed again and again where it lies
def _table(places: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """The runs of tensors with these addresses and sizes in bytes: shape [6, runs], int64."""
    rows = [row for number, place in enumerate(places) for row in _runs(number, *place)]
    return torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)


def _runs(number: int, address: int, size: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Address, words, bytes behind the last of a tensor's words, position of the first in its
    block, factor of the block, tensor's number.
    """
    words, tail = divmod(size, 8)
    factor = 1
    for at in range(0, max(words, 1), _RUN_WORDS):
        if at and at % BLOCK_WORDS == 0:
            factor = following_factor(factor)
        take = min(words - at, _RUN_WORDS)
        ends = at + take == words
        yield address + at * 8, take, tail if ends else 0, at % BLOCK_WORDS, factor, number
