"""The numbers of `device_digest.py` by one kernel for all tensors, instead of several for each.

A digest is made while servers are frozen, and hundreds of launches take longer than reading memory.
Each program of the kernel sums one piece; a table says of which tensor, and where it lies.
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


@triton.jit
def _factor(number, GOLDEN, MIX):  # type: ignore[no-untyped-def]
    return _mix(number, GOLDEN, MIX) | 1


@triton.jit
def _not_finite(words, exponent):  # type: ignore[no-untyped-def]
    """Not 0 where a quarter of a word has all bits of its exponent."""
    lowest = ((exponent & 0xFFFF) != 0).to(tl.int64)  # bit of each quarter with an exponent
    for quarter in tl.static_range(1, 4):
        lowest |= (((exponent >> (16 * quarter)) & 0xFFFF) != 0).to(tl.int64) << (16 * quarter)
    # a quarter of `~word & exponent` is 0 if all bits of the exponent are set; then a 1 that is
    # subtracted is borrowed from its highest bit, where no exponent has one
    borrowed = ((~words & exponent) - lowest) & (lowest << 15)
    return (borrowed | (borrowed >> 32)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_pieces(  # type: ignore[no-untyped-def]
    base, table, sums, broken, GOLDEN, MIX, LANES: tl.constexpr, COLUMNS: tl.constexpr
):
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS
    source = (base + tl.load(entry)).to(tl.pointer_type(tl.int64))
    count, width, pitch = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    first, target_pitch = tl.load(entry + 4), tl.load(entry + 5)
    target, exponent, tail = tl.load(entry + 6), tl.load(entry + 7), tl.load(entry + 8)
    lanes = tl.arange(0, LANES).to(tl.int64)
    total = tl.zeros((LANES,), dtype=tl.int64)
    worst = tl.zeros((LANES,), dtype=tl.int32)
    if (count == 1) | (width * 2 >= LANES):  # a row of lanes at a time
        for run in range(count):
            place = first + run * target_pitch
            lane, row = place % LANES, place // LANES + LANES + 1
            for begin in range(0, lane + width, LANES):
                column = begin - lane + lanes
                inside = (column >= 0) & (column < width)
                words = tl.load(source + run * pitch + column, mask=inside, other=0)
                total += _mix(words, GOLDEN, MIX) * _factor(row + begin // LANES, GOLDEN, MIX)
                worst |= _not_finite(words, exponent)
        total *= _factor(lanes + 1, GOLDEN, MIX)
    else:  # short runs: as many of them as there are lanes
        narrow = width.to(tl.int32)
        for begin in range(0, (count * width).to(tl.int32), LANES):
            place = begin + tl.arange(0, LANES)
            run = place // narrow
            column = (place - run * narrow).to(tl.int64)
            run = run.to(tl.int64)
            words = tl.load(source + run * pitch + column, mask=run < count, other=0)
            position = first + run * target_pitch + column
            factor = _factor(position // LANES + LANES + 1, GOLDEN, MIX)
            factor *= _factor(position % LANES + 1, GOLDEN, MIX)
            total += _mix(words, GOLDEN, MIX) * factor
            worst |= _not_finite(words, exponent)
    if tail:
        places = tl.arange(0, 8).to(tl.int64)
        octets = (source + width).to(tl.pointer_type(tl.uint8))
        values = tl.load(octets + places, mask=places < tail, other=0).to(tl.int64)
        last, end = tl.sum(values << (places * 8), axis=0), first + width
        factor = _factor(end // LANES + LANES + 1, GOLDEN, MIX)
        word = _mix(last, GOLDEN, MIX) * factor * _factor(end % LANES + 1, GOLDEN, MIX)
        total += tl.where(lanes == 0, word, 0)
        worst |= _not_finite(last, exponent)
    tl.atomic_add(sums + target, tl.sum(total, axis=0))
    if tl.max(tl.where(worst != 0, 1, 0), axis=0) > 0:
        tl.store(broken + target, 1)


def sum_pieces(base: int, table: torch.Tensor, sums: torch.Tensor, broken: torch.Tensor) -> None:
    """Add what pieces of tensors contribute to numbers of their whole tensors. The first call in a
    process compiles the kernel.

    Args:
        base: added to every address.
        table: int64 [pieces, 9]: address; number of runs; words in each; words from one to the
            next; the first word's place in its tensor; words from one run to the next there; which
            sum it is added to; `EXPONENTS` of the dtype, 0 if nothing is looked for; bytes behind
            the last word of a single run.
        sums: int64, on the GPU of the pieces.
        broken: int64, set to 1 where a piece holds NaN or infinity.
    """
    if not len(table):
        return
    with torch.cuda.device_of(sums):  # Triton launches on the current device
        _sum_pieces[(len(table),)](
            *(base, table, sums, broken, GOLDEN, MIX),
            LANES=LANES,
            COLUMNS=table.shape[1],
            num_warps=8,
        )


def sum_words(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Shape [2, len(tensors)], int64, on the tensors' GPU: the number of each, and 1 for those of a
    type in `EXPONENTS` that hold NaN or infinity.

    Every tensor must be contiguous, begin at a multiple of 8 bytes and hold at least one.
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
    sums = torch.zeros((2, len(tensors)), dtype=torch.int64, device=device)
    sum_pieces(0, _table(places, device), *sums)
    return sums


@lru_cache(maxsize=2)  # a model is summed again and again where it lies
def _table(places: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """For `sum_pieces`, from addresses, sizes in bytes and exponents of whole tensors."""
    rows = [row for number, place in enumerate(places) for row in _runs(number, *place)]
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _runs(number: int, address: int, size: int, exponents: int) -> Iterator[tuple[int, ...]]:
    """The pieces of one tensor."""
    words, tail = divmod(size, 8)
    for at in range(0, max(words, 1), _RUN_WORDS):
        width = min(words - at, _RUN_WORDS)
        ends = at + width == words
        yield address + at * 8, 1, width, 0, at, 0, number, exponents, tail if ends else 0
