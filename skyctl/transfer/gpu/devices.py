"""The sender's GPUs: which there are, their free memory, and buffers mirrored between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyctl.transfer.reader import SHARE_OF_FREE, fits_whole


def uuid_of(device: int) -> str:
    """The physical identity of a GPU, as vLLM's IPC engine keys its handles."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


_ALIGNMENT = 256


def free_bytes(device: int) -> int:
    """Free memory of a GPU now, in bytes."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


class MirroredSlots:
    """The same slots on several GPUs. The first GPU's are filled from the host; `mirror` copies one
    to the others over NVLink, which is several times faster than a second copy from the host, and
    than reading to two GPUs at once with the threads of one process.

    Each GPU's slots are one allocation, so that a server maps it once.
    """

    def __init__(self, devices: Sequence[int], sizes: Sequence[int]) -> None:
        import torch

        self.devices = list(devices)
        self._sizes = list(sizes)
        self._offsets = []
        total = 0
        for size in sizes:
            self._offsets.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.total_bytes = total
        self._buffers = [
            torch.empty(total, dtype=torch.uint8, device=f"cuda:{device}")
            for device in self.devices
        ]
        self._streams = [torch.cuda.Stream(device=device) for device in self.devices]
        for device in self.devices:
            torch.cuda.synchronize(device)

    @property
    def offsets(self) -> list[int]:
        """Byte offset of every slot in the allocation of each GPU."""
        return list(self._offsets)

    def buffer(self, device: int) -> Any:
        """All slots on one GPU, as one uint8 tensor."""
        return self._buffers[self.devices.index(device)]

    def addresses(self) -> list[int]:
        """Device address of every slot on the first GPU."""
        base: int = self._buffers[0].data_ptr()
        return [base + offset for offset in self._offsets]

    def view(self, device: int, slot: int) -> Any:
        """One slot on one GPU, as a uint8 tensor."""
        begin = self._offsets[slot]
        return self._buffers[self.devices.index(device)][begin : begin + self._sizes[slot]]

    def mirror(self, slot: int) -> None:
        """Copy a slot from the first GPU to all others, in parallel; returns when done."""
        import torch

        source = self.view(self.devices[0], slot)
        for device, stream in list(zip(self.devices, self._streams, strict=True))[1:]:
            with torch.cuda.stream(stream):
                self.view(device, slot).copy_(source, non_blocking=True)
        for stream in self._streams[1:]:
            stream.synchronize()

    def free(self) -> None:
        """Free the memory on the GPUs."""
        import torch

        self._buffers.clear()
        self._streams.clear()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def stage_slots(
    devices: Sequence[int],
    chunk_sizes: Sequence[int],
    ring: int,
    *,
    ring_only: bool = False,
    reserve_bytes: int = 0,
    as_many: bool = False,
) -> tuple[MirroredSlots, bool]:
    """Slots for a push on all of these GPUs, and whether the whole checkpoint fits in them.

    Raises:
        MemoryError: not even the ring fits.
    """
    free = min(free_bytes(device) for device in devices)
    sizes, whole = slot_sizes(
        free,
        chunk_sizes,
        ring,
        ring_only=ring_only,
        reserve_bytes=reserve_bytes,
        as_many=as_many,
    )
    return MirroredSlots(devices, sizes), whole


def slot_sizes(
    free: int,
    chunk_sizes: Sequence[int],
    ring: int,
    *,
    ring_only: bool = False,
    reserve_bytes: int = 0,
    as_many: bool = False,
) -> tuple[list[int], bool]:
    """Sizes of the slots for `free` free bytes, and whether each chunk has its own. Pure.

    One slot per chunk if `fits_whole`, else a ring of `ring` slots of the largest size, or with
    `as_many` of as many as fit. If `ring` covers all chunks, that many slots are taken: they fit,
    or it is an error.

    Raises:
        MemoryError: that many slots do not fit.
    """
    if ring >= len(chunk_sizes) and sum(chunk_sizes) > free:
        raise MemoryError(
            f"{sum(chunk_sizes)} bytes do not fit into the {free} bytes that are free on the "
            "sender's GPU; use --stage stream"
        )
    if ring >= len(chunk_sizes):
        return list(chunk_sizes), True
    if not ring_only and fits_whole(sum(chunk_sizes), free, reserve_bytes):
        return list(chunk_sizes), True
    if as_many and not ring_only:
        ring = max(ring, int((free - reserve_bytes) * SHARE_OF_FREE) // max(chunk_sizes))
    needed = ring * max(chunk_sizes)
    if needed > free * SHARE_OF_FREE:
        raise MemoryError(
            f"{ring} chunks of {max(chunk_sizes)} bytes do not fit into the {free} bytes that are "
            "free on the sender's GPU; take a smaller --chunk-size"
        )
    return [max(chunk_sizes)] * ring, False
