"""Delta pushes: layers whose bytes the servers already hold are not sent.

What servers hold is known tensor by tensor from the last verified push. Each server must still have
the digest that this content was verified with; otherwise everything is sent. The result of a delta
push is verified like any other: digest and rows of the whole model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.header import Tensor
from skyctl.push.expected import BY_BYTES
from skyctl.push.request import PushFleet
from skyctl.push.rows import layer_of
from skyctl.push.sites import Site, Weights, ask_all
from skyctl.push.verify import weights_digest
from skyctl.store.contents import Content
from skyctl.store.expected import ExpectedDigest
from skyctl.transfer.reader import ShardFiles

_READ_BYTES = 8 * 1024 * 1024
_THREADS = 16


@dataclass(frozen=True)
class Delta:
    """`crc32` has the checksum of each tensor of the new checkpoint, `held` names the tensors that
    the servers hold; `note` says why there are none.
    """

    crc32: Mapping[str, int]
    held: frozenset[str] = frozenset()
    note: str = ""

    def sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.name not in self.held]

    def skipped(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """As in `PushResult`."""
        left_out = [tensor for tensor in tensors if tensor.name in self.held]
        return {"tensors": len(left_out), "bytes": sum(tensor.nbytes for tensor in left_out)}


async def compare(
    checkpoint: Checkpoint, fleet: PushFleet, sites: Sequence[Site], *, timeout_s: float
) -> Delta:
    """Find what servers already hold of a checkpoint; reads all of it.

    Raises:
        PreflightError: its files changed since their headers were read.
    """
    crc32 = await asyncio.to_thread(checksums, checkpoint)
    if fleet.content is None:
        return Delta(crc32, note="everything is sent: what the servers hold is not known by tensor")
    why = await _unlike(fleet.content, fleet, sites, timeout_s=timeout_s)
    if why:
        return Delta(crc32, note=f"everything is sent: {why}")
    held = held_tensors(checkpoint.tensors, crc32, fleet.content.crc32)
    return Delta(crc32, held, "" if held else "everything is sent: every layer differs")


def held_tensors(
    tensors: Sequence[Tensor], crc32: Mapping[str, int], before: Mapping[str, int]
) -> frozenset[str]:
    """The tensors of layers in which no tensor differs or is gone. A layer is loaded as a whole:
    vLLM fuses tensors and completes modules. If no layer differs, the smallest is sent all the
    same: a push sends something. Pure.
    """
    layers: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        layers.setdefault(layer_of(tensor.name), []).append(tensor)
    lost = {layer_of(name) for name in before.keys() - crc32.keys()}
    alike = {
        layer: of
        for layer, of in layers.items()
        if layer not in lost and all(before.get(tensor.name) == crc32[tensor.name] for tensor in of)
    }
    if layers and len(alike) == len(layers):
        del alike[min(alike, key=lambda layer: sum(tensor.nbytes for tensor in alike[layer]))]
    return frozenset(tensor.name for of in alike.values() for tensor in of)


def content_digest(tensors: Sequence[Tensor], crc32: Mapping[str, int]) -> str:
    """Digest over names, types, shapes and the crc32 of every tensor; "" unless all are known."""
    if len(crc32) < len(tensors):
        return ""
    content = sorted((t.name, t.dtype, t.shape, crc32[t.name]) for t in tensors)
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def checksums(checkpoint: Checkpoint) -> dict[str, int]:
    """The crc32 of every tensor's bytes, by name. Raises CheckpointChanged."""
    files = ShardFiles(checkpoint.shards)

    def of(tensor: Tensor) -> int:
        found, buffer = 0, memoryview(bytearray(min(_READ_BYTES, max(tensor.nbytes, 1))))
        for at in range(0, tensor.nbytes, _READ_BYTES):
            part = buffer[: min(_READ_BYTES, tensor.nbytes - at)]
            files.read(tensor.shard, tensor.begin + at, [part])
            found = zlib.crc32(part, found)
        return found

    try:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            found = dict(
                zip(
                    (tensor.name for tensor in checkpoint.tensors),
                    threads.map(of, checkpoint.tensors),
                    strict=True,
                )
            )
        for number in range(len(checkpoint.shards)):
            files.check(number)
        return found
    finally:
        files.close()


async def _unlike(
    content: Content, fleet: PushFleet, sites: Sequence[Site], *, timeout_s: float
) -> str:
    """Why a server may hold other content than this; "" if all are seen to hold it."""
    unsure = [site.name for site in sites if site.weights is not Weights.OLD or site.asleep]
    if unsure:
        return f"{unsure[0]} may hold parts of several checkpoints, or sleeps"
    outcomes = await ask_all(
        sites, lambda site: weights_digest(site.vllm, timeout_s=timeout_s), timeout_s=timeout_s
    )
    known = set(fleet.expected.digests)
    for site, outcome in zip(sites, outcomes, strict=True):
        if outcome.value is None:
            return f"{site.name} could not be looked at: {outcome.detail}"
        verified = ExpectedDigest(f"{BY_BYTES}{content.digest}", site.engine, outcome.value.digest)
        if verified not in known:
            return f"{site.name} does not hold what was pushed last, as far as is known"
    return ""
