"""Digest tensors in place: a few milliseconds for a model that takes seconds to copy out.

A tensor's bytes are 64-bit little-endian words, the last one padded with zeros, in rows of `LANES`.
Its number is the sum, modulo 2^64, of `mix(word) * odd[row] * odd[lane]`: `mix` permutes the words,
and the odd factors are fixed and look random.

- A change of one word is never missed: an odd factor has an inverse.
- If several words change, let 2^v be the largest power of two that divides all differences of their
  mixed words. Of all choices of the factors, at most (64 - v) / 2^(63 - v) miss the change. `mix`
  keeps v small: whichever bits of a word change, v reaches n for about 2^-n of all words. So a
  change of content, other than one computed to be missed, is missed with a probability of about
  2^-56, or 2^-53 if every word that changes was the same and becomes the same.

Nothing less than two multiplications would do for `mix`. A product with an odd number, and a sum of
such products, keeps only 64 - k bits of a difference in bits from k on: signs, which are bit 63,
could change in any even number of words. With one fold of the upper half onto the lower, negating
both float32 of a word, bits 63 and 31, would again be a difference in bit 63.

Whoever wants two contents with one number can compute them: the factors are public. Numbers of
tensors of different sizes are not comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from skyctl.wire.copies import octets_of
from skyctl.wire.finite import EXPONENTS
from skyctl.wire.messages import GOLDEN, LANES, MIX

_BLOCK_WORDS = 2048 * LANES  # 32 MiB: what is computed from a block stays in the GPU's cache
_WORD = 8

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Within it, attributes of vLLM's parameters cost what those of plain tensors do: a tenth."""


def digest_on_device(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number per tensor (all on one device), with a single wait for the device at the end.

    Extra memory: at most about 32 MiB. Deterministic: integer sums do not depend on their order.
    """
    return [number for number, _ in examined_on_device(tensors)]


def examined_on_device(tensors: Sequence[torch.Tensor]) -> list[tuple[int, bool | None]]:
    """As `digest_on_device`, and whether each tensor is finite: None where nothing was learned of
    that on the way.
    """
    if not tensors:
        return []
    device = tensors[0].device
    sums = torch.zeros((2, len(tensors)), dtype=torch.int64, device=device)
    plain = [i for i, tensor in enumerate(tensors) if _has_kernel and _is_plain(tensor)]
    if plain:
        from skyctl.wire.triton_digest import sum_words

        sums[:, plain] = sum_words([tensors[i] for i in plain])
    if others := sorted(set(range(len(tensors))) - set(plain)):
        lanes = _factors(0, LANES, device)
        sums[0, others] = torch.stack([_sum(tensors[i], lanes) for i in others])
    numbers, broken = sums.tolist()
    finite: list[bool | None] = [None] * len(tensors)
    for i in plain:
        if tensors[i].dtype in EXPONENTS:
            finite[i] = not broken[i]
    return list(zip(numbers, finite, strict=True))


def sum_of_words(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What each of these words contributes to the number of its tensor, by its place there. Both
    are flat int64 tensors.
    """
    row, lane = places // LANES + LANES + 1, places % LANES + 1
    return _mix(words.clone()) * (_mix(row) | 1) * (_mix(lane) | 1)


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A view in memory order, as of a quantized weight stored transposed, to sum in place."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor if tensor.is_contiguous() else tensor.permute(order)


_has_kernel = find_spec("triton") is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in aligned words on a CUDA device, which one kernel sums for all tensors."""
    aligned = bool(tensor.numel()) and not tensor.data_ptr() % _WORD
    return tensor.device.type == "cuda" and aligned and tensor.is_contiguous()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix a flat int64 tensor in place."""
    halves = words.view(torch.int32)
    lower, upper = halves[::2], halves[1::2]  # words are little-endian
    for multiplier in (GOLDEN, MIX):
        words *= multiplier
        lower ^= upper
    return words


def _factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers: those of lanes begin at 0, those of rows at LANES."""
    return _mix(torch.arange(first + 1, first + 1 + count, device=device)) | 1


def _sum(tensor: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
    octets = octets_of(tensor.contiguous())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, octets.numel(), _BLOCK_WORDS * _WORD):
        block = octets[begin : begin + _BLOCK_WORDS * _WORD]
        rows = -(-block.numel() // (LANES * _WORD))
        words = torch.zeros(rows * LANES, dtype=torch.int64, device=tensor.device)
        words.view(torch.uint8)[: block.numel()] = block
        sums = _mix(words).view(rows, LANES).mul_(lanes).sum(1)
        first = LANES + begin // (LANES * _WORD)
        total += (sums * _factors(first, rows, tensor.device)).sum()
    return total
