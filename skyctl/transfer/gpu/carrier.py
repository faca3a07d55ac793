"""The common part of both GPU transports' senders: slots on GPUs, and the reader that fills them.

The process, its CUDA context and the reader's pinned ring outlive a push; the slots do not.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Sequence
from typing import Any

from skyctl.engines.vllm.inside.layout_wire import Program
from skyctl.transfer.gpu.chunks import DeviceChunkReader
from skyctl.transfer.gpu.devices import (
    MirroredSlots,
    fits_whole,
    free_bytes,
    stage_slots,
    uuid_of,
)
from skyctl.transfer.gpu.numbering import Numbering
from skyctl.transfer.gpu.reader import THREADS, DeviceReader
from skyctl.transfer.pace import Pace
from skyctl.transfer.reader import Piece, ShardFiles


def pickle_handles(handles: Any) -> str:
    """IPC handles in vLLM's HTTP form: pickle, then base64 text."""
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


class GpuCarrier:
    """Slots on every GPU of `devices`; the first one's are filled from the files.

    `server_gpus` are those of each server, which can be shown the slots on them.
    """

    def __init__(self, devices: Sequence[int], server_gpus: Sequence[Sequence[int]]) -> None:
        import torch

        self.devices = list(devices)
        self.server_gpus = [list(gpus) for gpus in server_gpus]
        torch.cuda.set_device(self.devices[0])
        # two processors are left to the servers, which work at the same time
        threads = max(2, min(THREADS, len(os.sched_getaffinity(0)) - 2))
        self._reader = DeviceReader(self.devices[0], threads=threads)
        self._slots: MirroredSlots | None = None
        self._numbering: Numbering | None = None
        self.staged_whole = False
        self.shown = False

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
        pace: Pace,
        ring_only: bool = False,
        reserve_bytes: int = 0,
        shown: bool = False,
    ) -> DeviceChunkReader:
        """A slot for each chunk if all of them fit on the GPUs, else a ring of `slots`.

        `shown`: servers will copy out of the slots by themselves (`export`). The slots are then
        also on the servers' GPUs if all chunks fit there; and a ring is as long as there is room.
        """
        sizes = [max(piece.offset + piece.nbytes for piece in chunk) for chunk in chunks]
        self.shown = shown
        mirrored, self.staged_whole = stage_slots(
            [*self.devices, *(self._room_for(sum(sizes)) if shown and not ring_only else ())],
            sizes,
            slots,
            ring_only=ring_only,
            reserve_bytes=reserve_bytes,
            as_many=shown,
        )
        self._slots = mirrored
        return DeviceChunkReader(
            files,
            chunks,
            mirrored.addresses(),
            self._reader,
            pace=pace,
            after_fill=mirrored.mirror,
            bytes_of=lambda slot: mirrored.view(self.devices[0], slot),
        )

    def _room_for(self, size: int) -> list[int]:
        """GPUs of servers that have no slots of their own, if `size` bytes fit on each of them.

        From here on they also hold the driver's memory for this process.
        """
        others = sorted({gpu for gpus in self.server_gpus for gpu in gpus} - set(self.devices))
        known = all(self.server_gpus)
        return others if known and all(fits_whole(size, free_bytes(g), 0) for g in others) else []

    def export(self) -> dict[str, Any] | None:
        """What servers need to map the slots on their GPUs: `handles`, one payload per server, and
        the `offsets` of the slots. None if slots are not on all of their GPUs.

        torch counts one release per export, so each server gets an export of its own.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        slots = self.slots
        if not all(gpus and set(gpus) <= set(slots.devices) for gpus in self.server_gpus):
            return None
        payloads = [
            {uuid_of(gpu): reduce_tensor(slots.buffer(gpu))[1] for gpu in gpus}
            for gpus in self.server_gpus
        ]
        return {"handles": [pickle_handles(one) for one in payloads], "offsets": slots.offsets}

    def number(self, programs: Sequence[Program]) -> None:
        """From here on, `numbers` returns what workers with these programs must hold."""
        self._numbering = Numbering(programs, self.devices[0])

    def numbers(self, chunk: int, slot: int) -> list[dict[str, int]]:
        """Numbers of the parameters that this chunk, in `slot`, completes; per program."""
        import torch

        if self._numbering is None:
            return []
        with torch.cuda.device(self.devices[0]):  # the reader's thread has its own current device
            return self._numbering.add(chunk, self.slots.view(self.devices[0], slot))

    def rest(self) -> None:
        """Free the slots' memory between pushes."""
        self._numbering = None
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.free()

    def close(self) -> None:
        self.rest()
        self._reader.close()

    def extra(self, slot: int) -> dict[str, Any]:
        return {}
