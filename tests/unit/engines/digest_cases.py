"""Contents of every dtype, and changes that no digest of them may miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from skyctl.wire.finite import EXPONENTS
from skyctl.wire.messages import LANES

WORDS = 256
Change = tuple[str, torch.Tensor]


def contents() -> Iterator[torch.Tensor]:
    """The bytes of a weight of each dtype, of ones and of zeros: flat int64 tensors of an even
    number of words.
    """
    draw = torch.Generator().manual_seed(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        weight = torch.randn(WORDS * 8 // dtype.itemsize, generator=draw) * 0.02
        yield weight.to(dtype).view(torch.int64)
    for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool):
        high = 2 if dtype == torch.bool else 100
        weight = torch.randint(0, high, (WORDS * 8 // dtype.itemsize,), generator=draw)
        yield weight.to(dtype).view(torch.int64)
    yield torch.ones(WORDS * 4, dtype=torch.bfloat16).view(torch.int64)
    yield torch.zeros(WORDS, dtype=torch.int64)


def for_the_kernel() -> list[torch.Tensor]:
    """Tensors of up to ten rows that end anywhere in a row, a word and a run of two rows; contents
    of every dtype, and changes of one.
    """
    draw = torch.Generator().manual_seed(4)
    lengths = (1, LANES - 1, LANES, LANES + 1, 2 * LANES, 9 * LANES + 33)
    sizes = [8 * length for length in lengths]
    sizes += [1, 7, 13, 8 * LANES + 7, 16 * LANES + 5, 24 * LANES - 1]
    drawn = [torch.randint(0, 256, (size,), generator=draw).to(torch.uint8) for size in sizes]
    weight = next(contents())
    some_changes = [changed for _, changed in changes(weight)][::8]
    return [*drawn, torch.randn(64, 32), torch.tensor(1.5), *contents(), *some_changes]


def broken_in_places() -> Iterator[torch.Tensor]:
    """Floats as large as their type allows, of two rows and three elements; the same with a value
    that is not finite in each place of a word, in the second row and behind the last whole word.
    """
    for dtype in EXPONENTS:
        size = 8 // dtype.itemsize
        good = torch.full((2 * LANES * size + 3,), torch.finfo(dtype).max, dtype=dtype)
        good[::2] *= -1
        yield good
        for place in (*range((LANES + 5) * size, (LANES + 6) * size), len(good) - 2):
            for value in (float("nan"), -float("inf")):
                yield good.index_fill(0, torch.tensor(place), value)


def changes(words: torch.Tensor) -> Iterator[Change]:
    """Each change's name and the changed content: one bit of some or of all words, the signs of
    elements by columns, stuck bits, words that moved. Some leave the content as it is.
    """
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(2))
    places = {
        "two": order[:2],
        "half of the": order[::2],
        "odd": slice(1, None, 2),
        "all": slice(None),
    }
    for bit in range(64):
        for name, place in places.items():
            yield f"bit {bit} of {name} words", _flipped(words, place, [bit])
        yield f"bit {bit} stuck at 0", words & ~_mask([bit])
        yield f"bit {bit} stuck at 1", words | _mask([bit])
    for bits in sign_bits():
        for name, place in places.items():
            yield f"bits {bits} of {name} words", _flipped(words, place, bits)
    yield "words reversed", words.flip(0)
    yield "words moved by one", words.roll(1)
    for pair in order[:32].view(-1, 2):
        exchanged = words.clone()
        exchanged[pair] = words[pair.flip(0)]
        yield f"words {pair.tolist()} exchanged", exchanged


def sign_bits() -> Iterator[list[int]]:
    """Sets of bits of a word that hold signs: of 2-, 4- or 8-byte elements in some or all columns,
    of 1-byte elements in all.
    """
    for size in (16, 32, 64):
        places = range(size - 1, 64, size)
        for count in range(1, len(places) + 1):
            yield from map(list, combinations(places, count))
    yield list(range(7, 64, 8))


def flipped_everywhere(words: torch.Tensor, bits: list[int]) -> torch.Tensor:
    """The content with these bits of every word flipped."""
    return _flipped(words, slice(None), bits)


def _flipped(words: torch.Tensor, place: torch.Tensor | slice, bits: list[int]) -> torch.Tensor:
    flipped = words.clone()
    flipped[place] ^= _mask(bits)
    return flipped


def _mask(bits: list[int]) -> int:
    mask = sum(1 << bit for bit in bits)
    return mask - (1 << 64) if mask >> 63 else mask


@dataclass
class Kernel:
    """Memory that only the kernel can read, as oneDNN's: it adds the bias before it rounds."""

    weight: Any

    def __call__(self, x: Any, _weight: Any, bias: Any) -> Any:
        product = x.double() @ self.weight.double().T
        return (product if bias is None else product + bias.double()).to(x.dtype)


class Packed(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A linear layer as vLLM leaves it on CPU: the weight is empty, a kernel holds the real one."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.input_size_per_partition = weight.shape[1]
        self.cpu_linear = Kernel(weight)
