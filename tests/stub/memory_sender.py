"""A sender of two chunks in this process, as far as a server sees one."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint, Tensor, read_checkpoint
from skyctl.checkpoints.header import torch_name
from skyctl.wire.messages import ChunkUpdate, ReceiverInit


class Sender:
    """A sender of the model that the server runs, as far as a server sees one: two chunks in
    sealed memory files of this process."""

    session = "5c1e5c1e"

    def __init__(self, model: str) -> None:
        checkpoint = read_checkpoint(model)
        middle = (len(checkpoint.tensors) + 1) // 2
        halves = checkpoint.tensors[:middle], checkpoint.tensors[middle:]
        self.slot_bytes = max(sum(_aligned(t.nbytes) for t in half) for half in halves)
        self.descriptors: list[int] = []
        self.chunks = [self._chunk(checkpoint, *half) for half in enumerate(halves)]
        names = [tensor.name for tensor in checkpoint.tensors]
        endpoint = {"pid": os.getpid(), "fds": self.descriptors}
        self.init = asdict(ReceiverInit("shm", self.session, names, self.slot_bytes, endpoint))

    def _chunk(self, checkpoint: Checkpoint, number: int, tensors: Sequence[Tensor]) -> Any:
        descriptor = os.memfd_create(f"skyctl-{self.session}-{number}", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, self.slot_bytes)
        chunk = ChunkUpdate(number, number, self.slot_bytes, [], [], [], [], [])
        offset = 0
        for tensor in tensors:
            with Path(checkpoint.shards[tensor.shard].path).open("rb") as shard:
                data = os.pread(shard.fileno(), tensor.nbytes, tensor.begin)
            os.pwrite(descriptor, data, offset)
            chunk.names.append(tensor.name)
            chunk.dtype_names.append(torch_name(tensor.dtype, tensor.name))
            chunk.shapes.append(list(tensor.shape))
            chunk.offsets.append(offset)
            chunk.crc32.append(zlib.crc32(data))
            offset += _aligned(tensor.nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.descriptors.append(descriptor)
        return asdict(chunk)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
