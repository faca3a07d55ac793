"""The common part of both GPU transports' senders: slots on GPUs, and what fills them.

The process, its CUDA context and the reader's pinned ring outlive a push; the slots do not.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.header import torch_name
from skyctl.transfer.carrier import GpuCarrier, Reading
from skyctl.transfer.gpu.devices import (
    MirroredSlots,
    free_bytes,
    stage_slots,
    uuid_of,
)
from skyctl.transfer.gpu.numbering import Numbering
from skyctl.transfer.gpu.reader import DeviceReader, Read, ReadBatch, Span, cut
from skyctl.transfer.gpu.relay import Relay
from skyctl.transfer.reader import THREADS, Filled, Pace, Piece, ShardFiles, SlotTurns, fits_whole
from skyctl.wire.layouts import Program

if TYPE_CHECKING:
    import torch

READ_TIMEOUT_S = 600.0


def pickle_handles(handles: Any) -> str:
    """IPC handles in vLLM's HTTP form: pickle, then base64 text."""
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


class DeviceCarrier(GpuCarrier):
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
        self._chunks: Sequence[Sequence[Piece]] = ()
        self._reads: list[list[Read]] = []
        self._slots: MirroredSlots | None = None
        self._numbering: Numbering | None = None
        self._relay: Relay | None = None
        self.staged_whole = False
        self.shown = False

    @property
    def slots(self) -> MirroredSlots:
        if self._slots is None:
            raise RuntimeError("open_reader() comes first")
        return self._slots

    def relay(self) -> Relay:
        """The group of this sender and those of other machines."""
        if self._relay is None:
            self._relay = Relay(self.devices[0])
        return self._relay

    def open_reader(self, reading: Reading) -> DeviceChunkReader:
        """A slot for each chunk if all of them fit on the GPUs, else a ring.

        Slots that are shown are also on the servers' GPUs if all chunks fit there; and a ring is as
        long as there is room.
        """
        chunks, shown, relay_rank = reading.chunks, reading.shown, reading.relay_rank
        ring_only = reading.ring_only
        sizes = [max(piece.offset + piece.nbytes for piece in chunk) for chunk in chunks]
        self.shown = shown
        mirrored, self.staged_whole = stage_slots(
            [*self.devices, *(self._room_for(sum(sizes)) if shown and not ring_only else ())],
            sizes,
            reading.slots,
            ring_only=ring_only,
            reserve_bytes=reading.reserve_bytes,
            as_many=shown,
        )
        self._slots = mirrored
        if relay_rank is not None:
            self.relay().begin()
        if chunks is not self._chunks:  # not those of the last push
            self._chunks, self._reads = chunks, list(map(reads_of, chunks))
        return DeviceChunkReader(
            reading.files,
            chunks,
            self._reads if not relay_rank else [[] for _ in chunks],
            mirrored.addresses(),
            self._reader,
            pace=reading.pace,
            after_fill=mirrored.mirror,
            bytes_of=lambda slot: mirrored.view(self.devices[0], slot),
            pass_on=None if relay_rank is None else self.relay().pass_on,
        )

    def _room_for(self, size: int) -> list[int]:
        """GPUs of servers that have no slots of their own, if `size` bytes fit on each of them.

        From here on they also hold the driver's memory for this process.
        """
        if not all(self.server_gpus):
            return []
        others = sorted({gpu for gpus in self.server_gpus for gpu in gpus} - set(self.devices))
        return others if all(fits_whole(size, free_bytes(g), 0) for g in others) else []

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
        return {"handles": list(map(pickle_handles, payloads)), "offsets": slots.offsets}

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

    def free_slots(self) -> None:
        """Free the slots' memory between pushes."""
        self._numbering = None
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.free()

    def close(self) -> None:
        self.free_slots()
        self._reader.close()

    def extra(self, slot: int) -> dict[str, Any]:
        return {}


@dataclass(eq=False)
class DeviceChunkReader:
    """The GPU counterpart of `transfer/reader.py`: fills slot k % slots with chunk k as soon as
    chunk k - slots is released.

    Reads of the following chunks are queued before the current one is waited for, so the copy
    engine never idles between chunks while there are free slots. There are no checksums: the bytes
    never pass through the CPU's registers, and vLLM's own engines take none.
    """

    files: ShardFiles
    """The checkpoint's open files."""
    chunks: Sequence[Sequence[Piece]]
    """The pieces of each chunk."""
    reads: Sequence[Sequence[Read]]
    """The reads of each chunk (`reads_of`)."""
    addresses: Sequence[int]
    """The slots' addresses on the GPU."""
    reader: DeviceReader
    """What reads into the GPU's memory."""
    _: KW_ONLY
    pace: Pace
    """How fast files may be read."""
    after_fill: Callable[[int], None]
    """Runs when a chunk's bytes are in its slot, to copy them to other GPUs for example."""
    bytes_of: Callable[[int], Any]
    """A slot as a uint8 tensor, which is scanned for NaN and infinity."""
    pass_on: Callable[[Any], None] | None = None
    """Gets each slot's tensor next, to send it to other senders; where nothing is read, to receive
    it."""

    def __post_init__(self) -> None:
        self._turns = SlotTurns(len(self.addresses))

    def run(self, on_filled: Callable[[Filled], None]) -> None:
        """Fill every chunk in order, calling `on_filled` after each. Returns early when stopped.

        Raises:
            CheckpointChanged: a file is not what it was.
            NotFinite: a tensor holds NaN or infinity.
            ReadFailed: a file cannot be read to the end.
        """
        queued: list[ReadBatch] = []
        for chunk in range(len(self.chunks)):
            if len(queued) == chunk and not self._turns.wait(chunk):
                return
            free = [
                number
                for number in range(len(queued), len(self.chunks))
                if self._turns.is_free(number)
            ]
            batches = [self._batch(number) for number in free]
            self.reader.submit(batches)
            queued += batches
            slot = self._turns.slot(chunk)
            read_from = {piece.shard for piece in self.chunks[chunk]} if self.reads[chunk] else ()
            try:
                self.reader.wait(queued[chunk], READ_TIMEOUT_S)
            finally:
                # after the bytes: what was read before a change was noticed must not be sent
                for shard in read_from:
                    self.files.check(shard)
            if self.reads[chunk]:
                self._refuse_not_finite(chunk, slot)
            if self.pass_on is not None:
                self.pass_on(self.bytes_of(slot))
            self.after_fill(slot)
            on_filled(Filled(chunk, slot, ()))

    def release(self, chunk: int) -> None:
        self._turns.release(chunk)

    def stop(self) -> None:
        """Make `run` return after its current chunk."""
        self._turns.stop()

    def _refuse_not_finite(self, chunk: int, slot: int) -> None:
        if any(piece.dtype for piece in self.chunks[chunk]):
            place = _first_not_finite(self.bytes_of(slot), self.chunks[chunk])
            if place is not None:
                raise self.files.not_finite(*place)

    def _batch(self, chunk: int) -> ReadBatch:
        address = self.addresses[self._turns.slot(chunk)]
        return ReadBatch(self.reads[chunk], self.files.descriptors, address, self.pace)


def reads_of(chunk: Sequence[Piece]) -> list[Read]:
    """What is read to fill a slot with a chunk."""
    return cut([Span(*run) for run in merged(chunk)])


def merged(pieces: Sequence[Piece]) -> list[tuple[int, int, int, int]]:
    """(shard, begin, nbytes, offset) of runs that are contiguous both on disk and in the chunk."""
    runs: list[tuple[int, int, int, int]] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if runs:
            shard, begin, nbytes, offset = runs[-1]
            follows = piece.begin == begin + nbytes and piece.offset == offset + nbytes
            if piece.shard == shard and follows:
                runs[-1] = (shard, begin, nbytes + piece.nbytes, offset)
                continue
        runs.append((piece.shard, piece.begin, piece.nbytes, piece.offset))
    return runs


def _first_not_finite(chunk: torch.Tensor, pieces: Sequence[Piece]) -> tuple[Piece, int] | None:
    """The first tensor that holds NaN or infinity, and the number of the element; None if there is
    none: one pass over the chunk, one wait. `chunk` is the slot's bytes (uint8) on any device;
    pieces without a dtype are skipped.
    """
    from skyctl.wire.finite import each_finite, finite_flags

    runs = list(_runs(pieces))
    if not runs:
        return None
    good = finite_flags([_tensor(chunk, run) for run in runs])
    for run in (run for run, finite in zip(runs, good, strict=True) if not finite):
        for piece in run:
            finite = each_finite(_tensor(chunk, [piece]))
            if not bool(finite.all()):
                return piece, int((~finite).nonzero()[0])
    return None


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Tensors of one type that follow each other without a gap: the bytes in gaps are undefined."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if not piece.dtype or not piece.nbytes:
            continue
        last = run[-1] if run else None
        if last and (last.dtype, last.offset + last.nbytes) != (piece.dtype, piece.offset):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _tensor(chunk: torch.Tensor, run: Sequence[Piece]) -> torch.Tensor:
    import torch

    part = chunk[run[0].offset : run[-1].offset + run[-1].nbytes]
    # packed without padding, a tensor may begin anywhere
    whole = part.clone() if part.data_ptr() % 8 else part
    return whole.view(getattr(torch, torch_name(run[0].dtype, "")))
