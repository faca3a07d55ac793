"""The content digest of a checkpoint: over every byte, whichever way it was read."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.header import Tensor
from skyctl.transfer.reader import ShardFiles

_READ_BYTES = 8 * 1024 * 1024
_THREADS = 16


def content_digest(tensors: Sequence[Tensor], crc32: Mapping[str, int]) -> str:
    """Digest over names, types, shapes and the crc32 of every tensor; "" unless all are known."""
    if len(crc32) < len(tensors):
        return ""
    content = sorted((t.name, t.dtype, t.shape, crc32[t.name]) for t in tensors)
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def read_content(checkpoint: Checkpoint) -> str:
    """The content digest of the files; reads all of them. Raises CheckpointChanged."""
    files = ShardFiles(checkpoint.shards)

    def crc32(tensor: Tensor) -> int:
        checksum, buffer = 0, memoryview(bytearray(min(_READ_BYTES, max(tensor.nbytes, 1))))
        for at in range(0, tensor.nbytes, _READ_BYTES):
            part = buffer[: min(_READ_BYTES, tensor.nbytes - at)]
            files.read(tensor.shard, tensor.begin + at, [part])
            checksum = zlib.crc32(part, checksum)
        return checksum

    try:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            names = (tensor.name for tensor in checkpoint.tensors)
            checksums = dict(zip(names, threads.map(crc32, checkpoint.tensors), strict=True))
        for number in range(len(checkpoint.shards)):
            files.check(number)
        return content_digest(checkpoint.tensors, checksums)
    finally:
        files.close()
