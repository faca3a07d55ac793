"""Digest tensors in place: a few milliseconds for a model that takes seconds to copy out.

Each tensor's bytes, as 64-bit words, are multiplied by fixed odd numbers that depend on the word's
position and summed modulo 2^64. A change of any one word always changes the sum (an odd factor has
an inverse); other changes are missed with a probability of about 2^-64.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from skyctl.engines.vllm.inside.layout_copy import octets_of
from skyctl.engines.vllm.inside.wire import BLOCK_WORDS, GOLDEN, MIX, following_factor

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""Within it, attributes of vLLM's parameters cost what those of plain tensors do: a tenth."""


def digest_on_device(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number per tensor (all on one device), with a single wait for the device at the end.

    Extra memory: at most about 64 MiB. Deterministic: integer sums do not depend on their order.
    """
    if not tensors:
        return []
    device = tensors[0].device
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    plain = [i for i, tensor in enumerate(tensors) if _has_kernel and _is_plain(tensor)]
    if plain:
        from skyctl.engines.vllm.inside.triton_digest import sum_words

        sums[plain] = sum_words([tensors[i] for i in plain])
    if rest := sorted(set(range(len(tensors))) - set(plain)):
        most = max(tensors[i].numel() * tensors[i].element_size() for i in rest) // 8
        factors = _factors(0, min(most, BLOCK_WORDS), device)
        last = _factors(BLOCK_WORDS - 7, BLOCK_WORDS, device)
        sums[rest] = torch.stack([_sum(tensors[i], factors, last) for i in rest])
    return [int(value) for value in sums.tolist()]


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A view in memory order, as of a quantized weight stored transposed, to sum in place."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor if tensor.is_contiguous() else tensor.permute(order)


_has_kernel = find_spec("triton") is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in aligned words on a CUDA device, which one kernel sums for all tensors."""
    aligned = bool(tensor.numel()) and not tensor.data_ptr() % 8
    return tensor.device.type == "cuda" and aligned and tensor.is_contiguous()


def _factors(begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, one for each of these positions in a block."""
    mixed = torch.arange(begin + 1, end + 1, dtype=torch.int64, device=device) * GOLDEN
    mixed ^= mixed >> 29
    mixed *= MIX
    return mixed | 1


def _sum(tensor: torch.Tensor, factors: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """`last`: the factors of the bytes behind the last whole word."""
    octets = octets_of(tensor.contiguous())
    whole = octets.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = octets[:whole]
    if words.data_ptr() % 8:  # a view into something larger; 64-bit words must be aligned
        words = words.clone()
    words = words.view(torch.int64)
    factor = 1
    for begin in range(0, words.numel(), BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        total += (block * factors[: block.numel()]).sum() * factor
        factor = following_factor(factor)
    if whole < octets.numel():
        rest = octets[whole:].to(torch.int64)
        total += (rest * last[-rest.numel() :]).sum()
    return total
