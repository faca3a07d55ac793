"""What the senders of both GPU transports share: slots on GPUs, and the reader that fills them.

The process, its CUDA context and the reader's pinned ring outlive a push; the slots do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from skyctl.transfer.gpu.chunks import DeviceChunkReader
from skyctl.transfer.gpu.devices import MirroredSlots, stage_slots
from skyctl.transfer.gpu.reader import THREADS, DeviceReader
from skyctl.transfer.reader import Piece, ShardFiles


class GpuCarrier:
    """Slots on every GPU of `devices`; the first one's are filled from the files."""

    def __init__(self, devices: Sequence[int]) -> None:
        import torch

        self.devices = list(devices)
        torch.cuda.set_device(self.devices[0])
        # two processors are left to the servers, which have work to do at the same time
        threads = max(2, min(THREADS, len(os.sched_getaffinity(0)) - 2))
        self._reader = DeviceReader(self.devices[0], threads=threads)
        self._slots: MirroredSlots | None = None
        self.staged_whole = False

    @property
    def slots(self) -> MirroredSlots:
        if self._slots is None:
            raise RuntimeError("open_reader() comes first")
        return self._slots

    def open_reader(
        self,
        files: ShardFiles,
        chunks: Sequence[Sequence[Piece]],
        *,
        slots: int,
        slot_bytes: int,
        threads: int,
        ring_only: bool = False,
        reserve_bytes: int = 0,
    ) -> DeviceChunkReader:
        """A slot for each chunk when all of them fit on the GPUs, else a ring of `slots`."""
        sizes = [max(piece.offset + piece.nbytes for piece in chunk) for chunk in chunks]
        mirrored, self.staged_whole = stage_slots(
            self.devices, sizes, slots, ring_only=ring_only, reserve_bytes=reserve_bytes
        )
        self._slots = mirrored
        return DeviceChunkReader(
            files,
            chunks,
            mirrored.addresses(),
            self._reader,
            after_fill=mirrored.mirror,
            bytes_of=lambda slot: mirrored.view(self.devices[0], slot),
        )

    def rest(self) -> None:
        """Give the slots' memory back between pushes."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.free()

    def close(self) -> None:
        self.rest()
        self._reader.close()

    def extra(self, slot: int) -> dict[str, Any]:
        return {}
