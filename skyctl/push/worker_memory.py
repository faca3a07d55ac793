"""Memory that a worker takes on its GPU, beside its model, while it loads a push: arithmetic.

    ipc    its own copy of the chunk; and the largest module, which is assembled beside the old one
    nccl   buffers on two streams, each with its own pool in torch's caching allocator; of SGLang's,
           which receive buckets, the bucket, and the empty tensors that it is laid out by
    both   nothing, where servers copy chunks from where the sender staged them on their GPUs, but
           for weights that layers process: what they make, and the largest of them (`spare_bytes`
           of `LayoutReport`), which is freed after the push

Memory that was taken stays in the allocator's cache: a server that already took a push of the same
plan takes no more. The streams are those of vLLM's packed consumer (`packed_tensor.py`): a buffer
is allocated before the one it replaces is freed, and one whose tensors wait for the rest of their
module lives on, so pools grow to several buffers each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from skyctl.transfer.plan import ChunkPlan, module_of
from skyctl.transfer.reader import BATCH_BYTES, fits_whole
from skyctl.wire.layouts import Copy, Program

MIB = 1 << 20
SENDER_CONTEXT_BYTES = 596 * MIB
"""Memory that the driver takes on a GPU for a sender that only copies there; measured on H200."""
NCCL_GROUP_BYTES = 484 * MIB
"""A communicator of a worker; measured on H200 with NCCL 2.28.9."""
_STREAMS = 2
_GRANULE = 2 * MIB


def worker_bytes(transport: str, plan: ChunkPlan, *, buckets: bool = False) -> int:
    """Bytes for each worker; 0 for transports that do not go through GPU memory. `buckets`: it
    receives each chunk in one broadcast.
    """
    if transport == "ipc":
        return plan.slot_bytes + max(_module_bytes(plan).values())
    if transport == "nccl" and buckets:
        return NCCL_GROUP_BYTES + 2 * plan.slot_bytes
    if transport == "nccl":
        return NCCL_GROUP_BYTES + _pooled_bytes(plan)
    return 0


def copier_bytes(
    plan: ChunkPlan, server_gpus: Sequence[Sequence[int]], free: Mapping[int, int]
) -> int:
    """Bytes on the GPU of each worker that copies what a sender with a GPU of its own stages.

    That is the whole plan, plus the driver's memory for the sender, if every GPU of the servers has
    room for it; otherwise two buffers that chunks are broadcast into.
    """
    size = sum(chunk.size for chunk in plan.chunks)
    used = {gpu for gpus in server_gpus for gpu in gpus}
    all_visible = all(server_gpus) and used <= free.keys()
    if all_visible and all(fits_whole(size, free[gpu] - SENDER_CONTEXT_BYTES, 0) for gpu in used):
        return size + SENDER_CONTEXT_BYTES
    return broadcast_bytes(plan)


def broadcast_bytes(plan: ChunkPlan) -> int:
    """Bytes of the buffers that chunks are broadcast into where they cannot be staged."""
    return _STREAMS * plan.slot_bytes


def numbering_bytes(programs: Iterable[Program]) -> int:
    """Bytes that a sender takes beside its slots to number these programs' parameters: for those
    that lie in no chunk as a whole, the largest one and a batch of them.
    """
    built = 0
    for program in programs:
        copies: dict[int, list[Copy]] = {}
        for copy in program.copies:
            copies.setdefault(copy.parameter, []).append(copy)
        for parts in copies.values():
            if len(parts) > 1 or parts[0].rows > 1:
                ends = (
                    part.target + (part.rows - 1) * part.target_pitch + part.row for part in parts
                )
                built = max(built, *ends)
    return built + max(built, BATCH_BYTES) if built else 0


def bytes_beside(transport: str, plan: ChunkPlan, server_gpus: Sequence[Sequence[int]]) -> int:
    """What all workers of the fullest GPU take there, one per server; one if GPUs are unknown.

    For transports whose sender has its slots on those GPUs, too.
    """
    return workers_on_fullest(server_gpus) * worker_bytes(transport, plan)


def workers_on_fullest(server_gpus: Sequence[Sequence[int]]) -> int:
    """The largest number of workers that share a GPU."""
    return max(Counter(gpu for gpus in server_gpus for gpu in gpus).values(), default=1)


def _module_bytes(plan: ChunkPlan) -> dict[str, int]:
    """Size of each module that vLLM loads at once."""
    sizes: Counter[str] = Counter()
    for tensor in plan.tensors:
        sizes[module_of(tensor.name)] += tensor.nbytes
    return sizes


@dataclass(eq=False)
class _Block:
    """A part of a segment. What received a chunk is held by its stream until the next one there,
    and by tensors that wait; what nobody holds is free.
    """

    size: int
    segment: list[_Block]
    holders: int = 0

    def let_go(self) -> None:
        self.holders -= 1
        merged: list[_Block] = []
        for block in self.segment:
            if merged and not merged[-1].holders and not block.holders:
                merged[-1].size += block.size
            else:
                merged.append(block)
        self.segment[:] = merged


class _Pool:
    """Segments of one stream in torch's caching allocator: best fit, split, merged when freed."""

    def __init__(self) -> None:
        self._segments: list[list[_Block]] = []

    @property
    def reserved(self) -> int:
        return sum(block.size for segment in self._segments for block in segment)

    def take(self, size: int) -> _Block:
        """A block with one holder."""
        free = (b for segment in self._segments for b in segment if not b.holders)
        block = min((b for b in free if b.size >= size), key=lambda b: b.size, default=None)
        if block is None:
            segment: list[_Block] = []
            block = _Block(-(-size // _GRANULE) * _GRANULE, segment)
            segment.append(block)
            self._segments.append(segment)
        spare = block.size - size
        if spare > MIB:
            place = block.segment.index(block)
            block.segment.insert(place + 1, _Block(spare, block.segment))
            block.size = size
        block.holders = 1
        return block


def _pooled_bytes(plan: ChunkPlan) -> int:
    """What both pools have reserved once all chunks are received and loaded. Each module whose
    tensors are all present is assembled in memory of its own, then copied.
    """
    pools = [_Pool() for _ in range(_STREAMS)]
    current: list[_Block | None] = [None] * _STREAMS
    sizes = _module_bytes(plan)
    waiting: dict[str, list[tuple[int, _Block]]] = {}
    for chunk in plan.chunks:
        stream = chunk.index % _STREAMS
        buffer = pools[stream].take(chunk.size)
        if (replaced := current[stream]) is not None:
            replaced.let_go()
        current[stream] = buffer
        for placed in chunk.placed:
            module = module_of(placed.tensor.name)
            parts = waiting.setdefault(module, [])
            parts.append((placed.tensor.nbytes, buffer))
            buffer.holders += 1
            if sum(size for size, _ in parts) >= sizes[module]:
                pools[stream].take(sizes[module]).let_go()
                for _, block in waiting.pop(module):
                    block.let_go()
    return sum(pool.reserved for pool in pools)
