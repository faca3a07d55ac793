"""The common part of both GPU transports' senders: slots on GPUs, what fills and what numbers them.

The process, its CUDA context and the reader's pinned ring outlive a push; the slots do not.

The numbers, one per parameter, say what servers must hold after a push, from the bytes that were
read. A parameter whose bytes are in a chunk exactly as they will be in a worker is numbered there;
others are first built from the sender's own chunks, as the worker's program says. A worker that
holds the same numbers (`engines/vllm/inside/device_digest.py`) holds the checkpoint, every byte of
it.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

from skyctl.engines.vllm.inside.layout_wire import Copy, Program
from skyctl.transfer.gpu.chunks import DeviceChunkReader
from skyctl.transfer.gpu.devices import (
    MirroredSlots,
    fits_whole,
    free_bytes,
    stage_slots,
    uuid_of,
)
from skyctl.transfer.gpu.reader import THREADS, DeviceReader
from skyctl.transfer.pace import Pace
from skyctl.transfer.reader import Piece, ShardFiles

_BATCH_BYTES = 256 * 1024 * 1024


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


class Numbering:
    """Numbers of the parameters of several programs. Chunks are added once each, in any order.

    Extra memory on the GPU, if parameters must be built: a batch of them, at least the largest one,
    and those not yet complete. It is allocated up front: allocating beside copies from the host
    holds these up.
    """

    def __init__(self, programs: Sequence[Program], device: int | str) -> None:
        self._device = device
        self._programs = [_Unfinished(program) for program in programs]
        if largest := max((program.largest_built for program in self._programs), default=0):
            import torch

            # freed at once to torch's cache, which serves the allocations that follow
            sizes = (largest, max(largest, _BATCH_BYTES))
            _ = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def add(self, chunk: int, octets: Any) -> list[dict[str, int]]:
        """Numbers of the parameters that this chunk completes, per program. Returns once the chunk
        is no longer needed.

        Args:
            chunk: its number in the plan.
            octets: its bytes, a flat uint8 tensor on the GPU.
        """
        return [self._add(program, chunk, octets) for program in self._programs]

    def _add(self, program: _Unfinished, chunk: int, octets: Any) -> dict[str, int]:
        from skyctl.engines.vllm.inside.layout_copy import copy_runs

        numbers: dict[str, int] = {}
        there: dict[str, Any] = {}
        batch: dict[str, Any] = {}
        for parameter, copies in program.copies_of(chunk):
            if program.lies_whole(parameter):
                begin = copies[0].source
                there[program.name(parameter)] = octets[begin : begin + copies[0].row]
                continue
            built = program.built(parameter, self._device)
            copy_runs(copies, octets, {parameter: built})
            if program.complete(parameter, copies):
                batch[program.name(parameter)] = built
                if sum(tensor.numel() for tensor in batch.values()) >= _BATCH_BYTES:
                    numbers |= _numbered(batch)
        return numbers | _numbered(batch) | _numbered(there)


class _Unfinished:
    """One program as its chunks arrive."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._copies: dict[int, dict[int, list[Copy]]] = {}
        self._left: Counter[int] = Counter()
        self._building: dict[int, Any] = {}
        for copy in program.copies:
            of_chunk = self._copies.setdefault(copy.chunk, {})
            of_chunk.setdefault(copy.parameter, []).append(copy)
            self._left[copy.parameter] += copy.rows * copy.row
        sizes = list(map(_bytes_of, program.parameters))
        self._whole = {
            copy.parameter
            for copy in program.copies
            if copy.rows == 1 and copy.row == sizes[copy.parameter]
        }
        built = (size for place, size in enumerate(sizes) if place not in self._whole)
        self.largest_built = max(built, default=0)

    def lies_whole(self, parameter: int) -> bool:
        """Whether the parameter is a single run of one chunk."""
        return parameter in self._whole

    def name(self, parameter: int) -> str:
        return self._program.parameters[parameter][0]

    def copies_of(self, chunk: int) -> list[tuple[int, list[Copy]]]:
        return list(self._copies.get(chunk, {}).items())

    def built(self, parameter: int, device: int | str) -> Any:
        """The parameter's bytes so far; padding and missing bytes are zero."""
        import torch

        if parameter not in self._building:
            size = _bytes_of(self._program.parameters[parameter])
            self._building[parameter] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._building[parameter]

    def complete(self, parameter: int, copies: Sequence[Copy]) -> bool:
        """Count what was copied; a complete parameter is dropped from the unfinished ones."""
        self._left[parameter] -= sum(copy.rows * copy.row for copy in copies)
        if self._left[parameter]:
            return False
        del self._building[parameter]
        return True


def _bytes_of(parameter: tuple[str, str, tuple[int, ...]]) -> int:
    import torch

    _, dtype, shape = parameter
    return prod(shape) * int(getattr(torch, dtype).itemsize)


def _numbered(batch: dict[str, Any]) -> dict[str, int]:
    """Numbers of the tensors in the batch, which is empty afterwards."""
    from skyctl.engines.vllm.inside.device_digest import digest_on_device

    numbers = dict(zip(batch, digest_on_device(list(batch.values())), strict=True))
    batch.clear()
    return numbers
