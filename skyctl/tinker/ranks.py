"""The ranks of a training worker: one process for each device, with the same models in the same
state. Each computes its share of a request's rows; sums over ranks are the same bits on all of
them, and again at every repetition with as many ranks.

They meet in a file that they inherit, over sockets of the loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class OutOfStep(Exception):
    """A rank failed where others compute with it: it cannot go on."""


BUCKET = 1 << 24
"""Elements that are summed at a time: 64 MiB in float32, a few times over."""


class Ranks:
    """One rank's view of all of them; by itself, the only one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def joined(cls, rank: int, size: int, file: int, device: str, timeout_s: float) -> Ranks:
        """Meet the others in this open file. Whoever waits this long for them ends."""
        if size == 1:
            return cls()
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if device != "cpu":
            torch.cuda.set_device(device)
            torch.cuda.init()  # or what meets the others would choose a device
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(f"/proc/self/fd/{file}", size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, size)

    def deal(self, lengths: Sequence[int]) -> list[list[int]]:
        """The indices of the rows that each rank computes, the longest first. A row goes to the
        rank that has the fewest tokens so far: a rule of the request alone.
        """
        shares: list[list[int]] = [[] for _ in range(self.size)]
        tokens = [0] * self.size
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            rank = tokens.index(min(tokens))
            tokens[rank] += lengths[index]
            shares[rank].append(index)
        return shares

    def exchange(self, content: bytes) -> list[bytes]:
        """What every rank gives, in the order of ranks."""
        return [content] if self.size == 1 else self._together(partial(self._exchanged, content))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace these tensors by their sums over all ranks, added in the order of ranks."""
        for bucket in _buckets(tensors) if self.size > 1 else ():
            self._together(partial(self._sum, bucket))

    def gather(self, rows: Tensor, count: int, owner: int) -> Tensor:
        """All of a tensor's `count` rows on the rank that is the owner; each has equally many, but
        for the last. Elsewhere what was given.
        """
        return self._together(partial(self._gathered, rows, count, owner))

    def _gathered(self, rows: Tensor, count: int, owner: int) -> Tensor:
        share = rows.new_zeros(-(-count // self.size), *rows.shape[1:])
        share[: len(rows)] = rows
        parts = [torch.empty_like(share) for _ in range(self.size if owner == self.rank else 0)]
        dist.gather(share, parts or None, dst=owner)
        return torch.cat(parts)[:count] if parts else rows

    def _exchanged(self, content: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(content)]))
        longest = max(1, *(int(length) for length in lengths))
        contents = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        mine = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        dist.all_gather(contents, mine)
        return [
            value.numpy().tobytes()[: int(length)]
            for value, length in zip(contents, lengths, strict=True)
        ]

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        """Each rank adds one part of all; none of it depends on how a library adds."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        size = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, size * self.size - flat.numel()))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded)
        total, *others = parts.split(size)
        for part in others:
            total += part
        dist.all_gather(list(padded.split(size)), total)
        split = padded[: flat.numel()].split([tensor.numel() for tensor in tensors])
        for tensor, value in zip(tensors, split, strict=True):
            tensor.copy_(value.view_as(tensor))

    def _together(self, collective: Callable[[], T]) -> T:
        """What every rank does at this point; one that cannot is out of step, and ends."""
        try:
            return collective()
        except Exception as error:
            raise SystemExit(f"rank {self.rank} lost the others: {error!r}") from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """The tensors in runs of at most `BUCKET` elements, or of one tensor."""
    begin, elements = 0, 0
    for index, tensor in enumerate(tensors):
        if elements and elements + tensor.numel() > BUCKET:
            yield tensors[begin:index]
            begin, elements = index, 0
        elements += tensor.numel()
    yield tensors[begin:]
