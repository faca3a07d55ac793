"""Many copies over a link between GPUs by one kernel, where the copy engine begins each anew.

It takes few multiprocessors, so that a model can serve beside it, and returns at once: enqueueing
9,432 copies takes a worker 99 ms. `python -m benchmarks.live --case moe-other` stages 31 GB in
93 ms by it, and in 121 without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import triton
import triton.language as tl

_PROGRAMS = 32
"""With 16 of them NVLink waits; 64 are no faster."""
_PIECE_WORDS = 1 << 16
_WORD = 8


@triton.jit(do_not_specialize=["pieces"])  # type: ignore[untyped-decorator]
def _copy_pieces(  # type: ignore[no-untyped-def]
    table, pieces, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):
    for piece in range(tl.program_id(0), pieces, PROGRAMS):
        entry = table + piece * 3
        source = tl.load(entry).to(tl.pointer_type(tl.int64))
        target = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
        words = tl.load(entry + 2)
        for begin in range(0, words, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            values = tl.load(source + place, mask=place < words)
            tl.store(target + place, values, mask=place < words)


def in_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the kernel can copy this: both are whole words without gaps, of one dtype."""
    both = (target, source)
    size = source.numel() * source.element_size()
    return (
        target.dtype == source.dtype
        and not size % _WORD
        and all(t.is_contiguous() and not t.data_ptr() % _WORD for t in both)
    )


def pieces_of(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The table of copies, each `in_words`, from destinations and sources: int64 [pieces, 3], of
    source address, destination address, and words.
    """

    def rows() -> Iterator[tuple[int, int, int]]:
        for target, source in pairs:
            words = source.numel() * source.element_size() // _WORD
            begins = source.data_ptr(), target.data_ptr()
            for at in range(0, words, _PIECE_WORDS):
                begin, end = (address + at * _WORD for address in begins)
                yield begin, end, min(_PIECE_WORDS, words - at)

    return torch.tensor(list(rows()), dtype=torch.int64).view(-1, 3)


def copy_pieces(table: torch.Tensor) -> None:
    """Enqueue the copies of a table, which is on the GPU of their destinations, on the current
    stream. Without a piece, it compiles the kernel.
    """
    with torch.cuda.device_of(table):  # Triton launches on the current device
        _copy_pieces[(_PROGRAMS,)](table, len(table), BLOCK=4096, PROGRAMS=_PROGRAMS, num_warps=16)
