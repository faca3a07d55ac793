"""Do servers hold the bytes that were sent? A few small tensors are compared end to end.

Digests tell whether servers agree with each other; a server that is alone, or a transport that
brings the same garbage to all of them, needs the checkpoint itself to compare with. vLLM fuses and
packs most tensors, but norms keep their names and shapes: those are looked at.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from operator import mul
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.dtypes import torch_name
from skyctl.checkpoints.header import Tensor
from skyctl.engines.vllm.inside.wire import BLOCK_WORDS, GOLDEN, MASK, MIX

_SAMPLES = 12
_MAX_BYTES = 128 * 1024

Sample = tuple[str, tuple[int, ...], int]
"""torch's name of the dtype, shape, and the number that `number_of` gives for the bytes."""


def choose_samples(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Up to a dozen small tensors, spread over the model, norms before others."""
    small = [tensor for tensor in tensors if 0 < tensor.nbytes <= _MAX_BYTES]
    norms = [tensor for tensor in small if "norm" in tensor.name]
    candidates = norms or small
    step = max(1, len(candidates) // _SAMPLES)
    return candidates[::step][:_SAMPLES]


def read_samples(checkpoint: Checkpoint) -> dict[str, Sample]:
    """What servers must say of the chosen tensors. Reads at most 1.5 MiB."""
    samples = {}
    for tensor in choose_samples(checkpoint.tensors):
        descriptor = os.open(Path(checkpoint.shards[tensor.shard].path), os.O_RDONLY)
        try:
            data = os.pread(descriptor, tensor.nbytes, tensor.begin)
        finally:
            os.close(descriptor)
        dtype = torch_name(tensor.dtype, tensor.name)
        samples[tensor.name] = (dtype, tuple(tensor.shape), number_of(data))
    return samples


def number_of(data: bytes) -> int:
    """`device_digest.py`'s number of up to one block of bytes, without torch."""
    whole = len(data) // 8 * 8
    words = struct.unpack(f"<{whole // 8}q", data[:whole])
    total: int = sum(map(mul, words, _factors(len(words))))
    rest = data[whole:]
    first = BLOCK_WORDS - len(rest)
    total += sum(octet * _factor(first + place) for place, octet in enumerate(rest))
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


@cache
def _factors(count: int) -> tuple[int, ...]:
    """Of the first `count` places; samples of one model have few sizes, and come with each push."""
    return tuple(map(_factor, range(count)))


def _factor(place: int) -> int:
    mixed = _signed((place + 1) * GOLDEN)
    mixed = _signed(mixed ^ (mixed >> 29))
    return _signed(mixed * MIX) | 1


def _signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def differing(expected: Mapping[str, Sample], answered: Mapping[str, Any]) -> list[str]:
    """Names of tensors that a worker holds in the checkpoint's dtype and shape, with other bytes.

    `answered` is a worker's answer, {name: [dtype, shape, number]}; what it leaves out, or holds in
    another form, cannot be compared.
    """
    wrong = []
    for name, (dtype, shape, number) in expected.items():
        if name not in answered:
            continue
        has_dtype, has_shape, has_number = answered[name]
        if has_dtype == dtype and tuple(has_shape) == shape and has_number != number:
            wrong.append(name)
    return wrong
