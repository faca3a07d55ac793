"""The numbers of `device_digest.py` by one kernel for all tensors, instead of several for each.

A digest is made while servers are frozen, and hundreds of launches take longer than reading memory.
Each program of the kernel sums one run of rows; a table says which tensor, and which rows of it.
Integer sums do not depend on their order, so they can be gathered with atomics. NaN and infinity
are looked for on the way: another pass over the memory would take as long again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from skyctl.wire.finite import EXPONENTS
from skyctl.wire.messages import GOLDEN, LANES, MIX

_RUN_WORDS = 512 * LANES


@triton.jit
def _mix(words, GOLDEN, MIX):  # type: ignore[no-untyped-def]
    words = words * GOLDEN
    words = words ^ ((words >> 32) & 0xFFFFFFFF)
    words = words * MIX
    return words ^ ((words >> 32) & 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_runs(  # type: ignore[no-untyped-def]
    addresses, words, tails, rows, targets, exponents, sums, broken, GOLDEN, MIX,
    LANES: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    address = tl.load(addresses + run)
    source = address.to(tl.pointer_type(tl.int64))
    count = tl.load(words + run)
    row = tl.load(rows + run) + LANES + 1  # the inputs of a row's factor, behind those of lanes
    lanes = tl.arange(0, LANES).to(tl.int64)
    total = tl.zeros((LANES,), dtype=tl.int64)
    exponent = tl.load(exponents + run)
    lowest = ((exponent & 0xFFFF) != 0).to(tl.int64)  # bit of each quarter with an exponent
    for quarter in tl.static_range(1, 4):
        lowest |= (((exponent >> (16 * quarter)) & 0xFFFF) != 0).to(tl.int64) << (16 * quarter)
    # a quarter of `~word & exponent` is 0 if all bits of the exponent are set; then a 1 that is
    # subtracted is borrowed from its highest bit, where no exponent has one
    highest = lowest << 15
    worst = tl.zeros((LANES,), dtype=tl.int32)
    for begin in range(0, count, LANES):
        values = tl.load(source + begin + lanes, mask=begin + lanes < count, other=0)
        total += _mix(values, GOLDEN, MIX) * (_mix(row + begin // LANES, GOLDEN, MIX) | 1)
        borrowed = ((~values & exponent) - lowest) & highest
        worst |= (borrowed | (borrowed >> 32)).to(tl.int32)
    tail = tl.load(tails + run)
    if tail:
        places = tl.arange(0, 8).to(tl.int64)
        octets = (address + count * 8).to(tl.pointer_type(tl.uint8))
        values = tl.load(octets + places, mask=places < tail, other=0).to(tl.int64)
        last = tl.sum(values << (places * 8), axis=0)
        word = _mix(last, GOLDEN, MIX) * (_mix(row + count // LANES, GOLDEN, MIX) | 1)
        total += tl.where(lanes == count % LANES, word, 0)
        borrowed = ((~last & exponent) - lowest) & highest
        worst |= (borrowed | (borrowed >> 32)).to(tl.int32)
    result = tl.sum(total * (_mix(lanes + 1, GOLDEN, MIX) | 1), axis=0)
    target = tl.load(targets + run)
    tl.atomic_add(sums + target, result)
    if tl.max(tl.where(worst != 0, 1, 0), axis=0) > 0:
        tl.store(broken + target, 1)


def sum_words(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Shape [2, len(tensors)], int64, on the tensors' GPU: the number of each, and 1 for those of a
    type in `EXPONENTS` that hold NaN or infinity.

    Every tensor must be contiguous, begin at a multiple of 8 bytes and hold at least one. The first
    call in a process compiles the kernel.
    """
    device = tensors[0].device
    places = tuple(
        (
            tensor.data_ptr(),
            tensor.numel() * tensor.element_size(),
            EXPONENTS.get(tensor.dtype, 0),
        )
        for tensor in tensors
    )
    table = _table(places, device)
    sums = torch.zeros((2, len(tensors)), dtype=torch.int64, device=device)
    grid = (table.shape[1],)
    with torch.cuda.device_of(sums):  # Triton launches on the current device
        _sum_runs[grid](*table, *sums, GOLDEN, MIX, LANES=LANES, num_warps=8)
    return sums


@lru_cache(maxsize=2)  # a model is summed again and again where it lies
def _table(places: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """The runs of tensors with these addresses, sizes in bytes and exponents: shape [6, runs],
    int64.
    """
    rows = [row for number, place in enumerate(places) for row in _runs(number, *place)]
    return torch.tensor(rows, dtype=torch.int64).T.contiguous().to(device)


def _runs(
    number: int, address: int, size: int, exponents: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Address, words, bytes behind the last of a tensor's words, first row, tensor's number,
    exponents in a word.
    """
    words, tail = divmod(size, 8)
    for at in range(0, max(words, 1), _RUN_WORDS):
        take = min(words - at, _RUN_WORDS)
        ends = at + take == words
        yield address + at * 8, take, tail if ends else 0, at // LANES, number, exponents


@triton.jit  # type: ignore[untyped-decorator]
def _sum_pieces(  # type: ignore[no-untyped-def]
    base, table, sums, broken, GOLDEN, MIX, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    entry = table + tl.program_id(0) * 8
    source = (base + tl.load(entry)).to(tl.pointer_type(tl.int64))
    width = tl.load(entry + 2).to(tl.int32)
    count = tl.load(entry + 1).to(tl.int32) * width
    pitch, first, target_pitch = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    target, exponents = tl.load(entry + 6), tl.load(entry + 7)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    worst = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        run = place // width
        column = (place - run * width).to(tl.int64)
        run = run.to(tl.int64)
        words = tl.load(source + run * pitch + column, mask=place < count, other=0)
        position = first + run * target_pitch + column
        row, lane = position // LANES, position % LANES
        factor = _mix(row + LANES + 1, GOLDEN, MIX) | 1
        total += _mix(words, GOLDEN, MIX) * factor * (_mix(lane + 1, GOLDEN, MIX) | 1)
        for quarter in tl.static_range(4):
            mask = (exponents >> (16 * quarter)) & 0xFFFF
            bits = (words >> (16 * quarter)) & mask
            worst |= tl.where((mask != 0) & (bits == mask), 1, 0)
    tl.atomic_add(sums + target, tl.sum(total, axis=0))
    if tl.max(worst, axis=0) > 0:
        tl.atomic_max(broken + target, 1)


def sum_pieces(base: int, table: torch.Tensor, sums: torch.Tensor, broken: torch.Tensor) -> None:
    """Add what pieces of tensors contribute to numbers of their whole tensors.

    Args:
        base: added to every address.
        table: int64 [pieces, 8]: address, number of runs, words in each, words from one to the
            next; the first word's place in its tensor, words from one run to the next there; which
            sum it is added to; masks of the exponents in a word's four quarters, 0 where no NaN
            can be.
        sums: int64, on the GPU of the pieces.
        broken: int32, set to 1 where a piece holds NaN or infinity.
    """
    if not len(table):
        return
    with torch.cuda.device_of(sums):  # Triton launches on the current device
        _sum_pieces[(len(table),)](
            *(base, table, sums, broken, GOLDEN, MIX), LANES=LANES, BLOCK=1024, num_warps=4
        )
