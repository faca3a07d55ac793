"""The digest that is computed where tensors lie, here on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, combinations, product

import pytest
import torch

from skyctl.transfer.gpu.numbering import Numbering
from skyctl.wire import device_digest
from skyctl.wire.device_digest import digest_on_device
from skyctl.wire.layouts import Copy, Program
from tests.unit.engines.digest_cases import changes, contents, flipped_everywhere, sign_bits

Numbers = Callable[[Sequence[torch.Tensor]], list[int]]


def number(tensor: torch.Tensor) -> int:
    return digest_on_device([tensor])[0]


def by_sender(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The numbers that a sender expects of parameters that it reads unaligned: every second one
    lies whole in the first chunk, the others are built from two.
    """
    chunks = [torch.zeros(3, dtype=torch.uint8)], [torch.zeros(5, dtype=torch.uint8)]
    begins, copies = [3, 5], []
    for parameter, tensor in enumerate(tensors):
        octets = tensor.view(torch.uint8)
        cut = len(octets) if parameter % 2 else len(octets) // 3
        for chunk, part in enumerate((octets[:cut], octets[cut:])):
            if len(part):
                place = begins[chunk], len(part), chunk * cut, len(part)
                copies.append(Copy(chunk, parameter, 1, len(part), *place))
                chunks[chunk].append(part)
                begins[chunk] += len(part)
    parameters = tuple((str(n), "uint8", (tensor.nbytes,)) for n, tensor in enumerate(tensors))
    numbering = Numbering([Program("", parameters, tuple(copies))], "cpu")
    numbers: dict[str, int] = {}
    for chunk, parts in enumerate(chunks):
        numbers |= numbering.add(chunk, torch.cat(parts))[0]
    return [numbers[str(n)] for n in range(len(tensors))]


@pytest.mark.parametrize("numbers", [digest_on_device, by_sender])
def test_whatever_changes_in_a_weight_of_any_dtype_its_number_changes(numbers: Numbers) -> None:
    for words in contents():
        before = number(words)
        assert numbers([words]) == [before]
        names, changed = zip(*changes(words), strict=True)
        same = [bool(torch.equal(content, words)) for content in changed]
        unchanged = [n == before for n in numbers(changed)]
        missed = [n for n, *pair in zip(names, unchanged, same, strict=True) if len({*pair}) > 1]
        assert not missed


def test_any_two_bits_can_flip_in_every_word_and_are_seen() -> None:
    words = next(contents())
    pairs = [[*bits] for bits in combinations(range(64), 2)]
    numbers = digest_on_device([words, *(flipped_everywhere(words, bits) for bits in pairs)])
    assert [bits for bits, n in zip(pairs, numbers[1:], strict=True) if n == numbers[0]] == []


def test_whichever_bits_change_a_mixed_word_differs_in_its_lowest_bits() -> None:
    """What the probability of missing a change follows from: of all words, half differ in the
    lowest bit, a quarter first in the next, and so on; a difference first in bit v costs 2^v.
    """
    words = torch.randint(-(2**62), 2**62, (4096,), generator=torch.Generator().manual_seed(3))
    before = device_digest._mix(words.clone())
    few = (map(list, combinations(range(64), count)) for count in (1, 2))
    for bits in chain(sign_bits(), *few):
        difference = device_digest._mix(flipped_everywhere(words, bits)) - before
        lowest = (difference & -difference).abs().double().log2()
        assert lowest.mean() < 2, bits


@pytest.mark.parametrize("numbers", [digest_on_device, by_sender])
def test_every_bit_counts_also_in_bytes_behind_the_last_whole_word(numbers: Numbers) -> None:
    for size in range(1, 17):
        octets = torch.arange(7, 7 + size, dtype=torch.uint8)
        changed = []
        for place, bit in product(range(size), range(8)):
            changed.append(octets.clone())
            changed[-1][place] ^= 1 << bit
        assert len({*numbers([octets, *changed])}) == 1 + len(changed)


def test_exchanged_rows_and_blocks_change_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(4 * device_digest.LANES + 5)
    before = number(rows)
    monkeypatch.setattr(device_digest, "_BLOCK_WORDS", 2 * device_digest.LANES)
    assert number(rows) == before  # blocks bound memory, and are no part of the digest
    for first, second in combinations(range(4), 2):
        changed = rows.clone()
        place = torch.arange(device_digest.LANES)
        first_row, second_row = (place + row * device_digest.LANES for row in (first, second))
        changed[first_row], changed[second_row] = rows[second_row], rows[first_row]
        assert number(changed) != before
    transposed = rows.clone()
    square = transposed[: 4 * device_digest.LANES].view(4, -1)[:, :4]
    square.copy_(square.T.clone())  # lanes and rows have factors of their own
    assert number(transposed) != before


def test_a_tensor_of_several_dimensions_has_the_number_of_its_bytes() -> None:
    weight = torch.randn(37, 129, dtype=torch.bfloat16)
    assert number(weight) == number(weight.view(torch.uint8).view(-1))
    assert number(torch.tensor(1.5)) == number(torch.tensor([1.5]))


def test_each_of_several_tensors_gets_its_own_number() -> None:
    ones, zeros = torch.ones(8), torch.zeros(8)
    assert digest_on_device([ones, zeros]) == [number(ones), number(zeros)]
    assert digest_on_device([]) == []


def test_kernels_start_on_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts them on the current one, which reads no memory of another."""
    pytest.importorskip("triton")
    from skyctl.wire import triton_copies, triton_digest

    current: list[torch.Tensor] = []
    started_on: list[torch.Tensor | None] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: started_on.append(current[-1] if current else None)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(triton_digest, "_sum_pieces", Kernel())
    monkeypatch.setattr(triton_copies, "_copy_pieces", Kernel())
    sums, table = torch.zeros((2, 1), dtype=torch.int64), torch.zeros((1, 9), dtype=torch.int64)
    triton_digest.sum_pieces(0, table, *sums)
    triton_copies.copy_pieces(table)
    assert started_on[0] is not None and started_on[0].data_ptr() == sums.data_ptr()
    assert started_on[1] is table
