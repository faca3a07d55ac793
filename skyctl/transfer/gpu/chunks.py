"""Fill device slots with chunks ahead of their use, and scan them for NaN and infinity.

The GPU counterpart of `transfer/reader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.dtypes import torch_name
from skyctl.transfer.gpu.reader import DeviceReader, ReadBatch, Span
from skyctl.transfer.pace import Pace
from skyctl.transfer.reader import Filled, Piece, ShardFiles, SlotTurns

if TYPE_CHECKING:
    import torch

READ_TIMEOUT_S = 600.0


class DeviceChunkReader:
    """Fills slot k % slots with chunk k as soon as chunk k - slots is released.

    Reads of the following chunks are queued before the current one is waited for, so the copy
    engine never idles between chunks while there are free slots. `after_fill` runs when a chunk's
    bytes are on the device (to copy them to other GPUs, for example); `bytes_of` returns a slot as
    a uint8 tensor, which is scanned for NaN and infinity. There are no checksums: the bytes never
    pass through the CPU's registers, and vLLM's own engines take none.
    """

    def __init__(
        self,
        files: ShardFiles,
        chunks: Sequence[Sequence[Piece]],
        addresses: Sequence[int],
        reader: DeviceReader,
        *,
        pace: Pace,
        after_fill: Callable[[int], None],
        bytes_of: Callable[[int], Any],
    ) -> None:
        self._files = files
        self._chunks = chunks
        self._addresses = addresses
        self._reader = reader
        self._pace = pace
        self._after_fill = after_fill
        self._bytes_of = bytes_of
        self._turns = SlotTurns(len(addresses))

    def run(self, on_filled: Callable[[Filled], None]) -> None:
        """Fill every chunk in order, calling `on_filled` after each. Returns early when stopped.

        Raises:
            CheckpointChanged: a file is not what it was.
            NotFinite: a tensor holds NaN or infinity.
            ReadFailed: a file cannot be read to the end.
        """
        queued: list[ReadBatch] = []
        for chunk in range(len(self._chunks)):
            if len(queued) == chunk and not self._turns.wait(chunk):
                return
            free = [
                number
                for number in range(len(queued), len(self._chunks))
                if self._turns.is_free(number)
            ]
            batches = [self._batch(number) for number in free]
            self._reader.submit(batches)
            queued += batches
            self._reader.wait(queued[chunk], READ_TIMEOUT_S)
            # after the bytes: what was read before a change was noticed must not be sent
            for shard in {piece.shard for piece in self._chunks[chunk]}:
                self._files.check(shard)
            slot = self._turns.slot(chunk)
            self._refuse_not_finite(chunk, slot)
            self._after_fill(slot)
            on_filled(Filled(chunk, slot, ()))

    def release(self, chunk: int) -> None:
        self._turns.release(chunk)

    def stop(self) -> None:
        """Make `run` return after its current chunk."""
        self._turns.stop()

    def _refuse_not_finite(self, chunk: int, slot: int) -> None:
        if any(piece.dtype for piece in self._chunks[chunk]):
            found = _first_not_finite(self._bytes_of(slot), self._chunks[chunk])
            if found is not None:
                raise self._files.not_finite(*found)

    def _batch(self, chunk: int) -> ReadBatch:
        base = self._addresses[self._turns.slot(chunk)]
        return ReadBatch(
            [
                Span(self._files.descriptor(shard), begin, nbytes, base + offset)
                for shard, begin, nbytes, offset in merged(self._chunks[chunk])
            ],
            self._pace,
        )


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
    import torch

    from skyctl.engines.vllm.inside.finite import all_finite, each_finite

    runs = list(_runs(pieces))
    if not runs:
        return None
    good = torch.stack([all_finite(_tensor(chunk, run)) for run in runs]).tolist()
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
