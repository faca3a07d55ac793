"""Fill slots with chunks ahead of their use: reads shards straight into reused memory, at most at a
given pace while servers serve beside it.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from mmap import mmap
from pathlib import Path
from threading import Condition
from typing import Any

from skyctl.checkpoints.finite import NotFinite, first_not_finite
from skyctl.checkpoints.header import (
    FileIdentity,
    Shard,
    digest_header,
    read_header,
    read_raw_header,
)
from skyctl.errors import PreflightError

# on GPUs
SHARE_OF_FREE = 0.9
"""The share of a GPU's free memory that a sender may take."""
BATCH_BYTES = 256 * 1024 * 1024
"""Parameters are numbered together up to this size."""
PIECE_BYTES = 5 * 1024 * 1024
THREADS = 12
DEPTH = 2
PINNED_BYTES = THREADS * DEPTH * PIECE_BYTES
"""Pinned host memory of a reader with all its threads."""


def fits_whole(whole: int, free: int, reserve: int) -> bool:
    """Whether a checkpoint fits on a GPU with `free` bytes, of which servers that load it there
    take `reserve`.
    """
    return whole <= (free - reserve) * SHARE_OF_FREE


class Pace:
    """Bytes per second over all threads of a process, until lifted; None: no limit.

    Each read reserves its time after the previous one, so a wait that ends late is made up for;
    unused time is not saved up.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._lifted = threading.Event()
        self._wait = wait or self._lifted.wait
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def take(self, nbytes: int) -> None:
        """Return when `nbytes` may be read."""
        if self._rate is None or self._lifted.is_set():
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        if begin > now:
            self._wait(begin - now)

    def lift(self) -> None:
        """Remove the limit; waiting threads go on at once."""
        self._lifted.set()


_RUN_BYTES = 16 * 1024 * 1024
_MAX_BUFFERS = 512  # per preadv; the kernel takes 1024


class CheckpointChanged(PreflightError):
    """The checkpoint on disk is no longer the one that was checked."""


@dataclass(frozen=True)
class Piece:
    """One tensor's bytes: their place on disk, and in the chunk."""

    shard: int
    """Number of the file."""
    begin: int
    """Offset in the file."""
    nbytes: int
    """Size in bytes."""
    offset: int
    """Offset in the chunk."""
    dtype: str = ""
    """The safetensors name, given if NaN and infinity are to be refused."""


@dataclass(frozen=True)
class Filled:
    """A chunk in a slot of the sender. `crc32` has one checksum per tensor, none if the bytes never
    pass through the CPU; `extra` is what the carrier adds (such as memory handles).
    """

    chunk: int
    slot: int
    crc32: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


class ShardFiles:
    """The open files of a checkpoint, checked to be the very ones whose headers were read.

    `elsewhere`: the headers were read on another machine, where a file has other inode numbers. The
    file is then identified by its header and size, as of when it is opened.
    """

    def __init__(self, shards: Sequence[Shard], *, elsewhere: bool = False) -> None:
        self._shards = list(shards)
        self._descriptors: list[int] = []
        try:
            for shard in shards:
                self._open(shard, elsewhere)
        except BaseException:
            self.close()
            raise

    def _open(self, shard: Shard, elsewhere: bool) -> None:
        number = len(self._descriptors)
        try:
            self._descriptors.append(os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise CheckpointChanged(f"{shard.path} cannot be opened: {error}") from error
        raw = read_raw_header(self._descriptors[number], Path(shard.path))
        if digest_header(raw) != shard.header_digest:
            raise CheckpointChanged(f"{shard.path} changed since it was checked: new header")
        if elsewhere:
            now = FileIdentity.of_status(os.fstat(self._descriptors[number]))
            own = replace(now, size=shard.identity.size)
            self._shards[number] = replace(shard, identity=own)
        self.check(number)

    @property
    def descriptors(self) -> Sequence[int]:
        """The open files of the shards; not to be closed by the caller."""
        return self._descriptors

    def check(self, number: int) -> None:
        """Raise CheckpointChanged unless file and path are unchanged."""
        shard = self._shards[number]
        try:
            statuses = [os.fstat(self._descriptors[number]), Path(shard.path).stat()]
        except OSError as error:
            raise CheckpointChanged(f"{shard.path} vanished during the push: {error}") from error
        for status in statuses:
            if FileIdentity.of_status(status) != shard.identity:
                raise CheckpointChanged(f"{shard.path} changed during the push")

    def read(self, number: int, begin: int, views: list[memoryview]) -> None:
        """Fill `views` with consecutive bytes from `begin`."""
        remaining = [view for view in views if view.nbytes]
        while remaining:
            count = os.preadv(self._descriptors[number], remaining[:_MAX_BUFFERS], begin)
            if count == 0:
                raise CheckpointChanged(f"{self._shards[number].path} was cut at byte {begin}")
            begin += count
            while remaining and count >= remaining[0].nbytes:
                count -= remaining.pop(0).nbytes
            if count:
                remaining[0] = remaining[0][count:]

    def not_finite(self, piece: Piece, element: int) -> NotFinite:
        """The error for a tensor that holds NaN or infinity."""
        path = self._shards[piece.shard].path
        _, tensors = read_header(Path(path))
        name = next((t.name for t in tensors if t.begin == piece.begin and t.nbytes), "a tensor")
        return NotFinite(path, name, element)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


class SlotTurns:
    """Slots in turn: chunk k goes to slot k % slots, once chunk k - slots is released."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._released = 0
        self._stopped = False
        self._changed = Condition()

    def slot(self, chunk: int) -> int:
        return chunk % self.slots

    def is_free(self, chunk: int) -> bool:
        """Whether the slot of `chunk` may be filled now."""
        return not self._stopped and chunk - self._released < self.slots

    def wait(self, chunk: int) -> bool:
        """Wait until the slot of `chunk` is free; False if stopped."""
        with self._changed:
            while not self._stopped and not self.is_free(chunk):
                self._changed.wait()
            return not self._stopped

    def release(self, chunk: int) -> None:
        """Every server has loaded `chunk`."""
        with self._changed:
            self._released = max(self._released, chunk + 1)
            self._changed.notify_all()

    def stop(self) -> None:
        """End all waiting."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class ChunkReader:
    """Fills slots of host memory with chunks, one after the other, ahead of their use.

    `run` belongs in a thread of its own; `release` and `stop` may be called from any.
    """

    def __init__(
        self,
        files: ShardFiles,
        chunks: Sequence[Sequence[Piece]],
        slots: Sequence[memoryview],
        *,
        threads: int,
        pace: Pace,
    ) -> None:
        self._files = files
        self._pace = pace
        self._chunks = chunks
        self._slots = slots
        self._turns = SlotTurns(len(slots))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def run(self, on_filled: Callable[[Filled], None]) -> None:
        """Fill every chunk in order, calling `on_filled` after each. Returns early when stopped.

        Raises:
            CheckpointChanged: a file is not what it was.
            NotFinite: a tensor holds NaN or infinity.
            OSError: a file cannot be read.
        """
        try:
            for chunk, pieces in enumerate(self._chunks):
                if not self._turns.wait(chunk):
                    return
                slot = self._turns.slot(chunk)
                on_filled(Filled(chunk, slot, tuple(self._fill(pieces, self._slots[slot]))))
        finally:
            self._pool.shutdown()

    def release(self, chunk: int) -> None:
        self._turns.release(chunk)

    def stop(self) -> None:
        """Make `run` return after its current chunk."""
        self._turns.stop()

    def _fill(self, pieces: Sequence[Piece], slot: memoryview) -> list[int]:
        checksums = [0] * len(pieces)
        owner = slot.obj
        whole = owner if isinstance(owner, mmap) and len(owner) == slot.nbytes else None

        def read(run: list[int]) -> None:
            views = [slot[pieces[i].offset : pieces[i].offset + pieces[i].nbytes] for i in run]
            first = pieces[run[0]]
            # a larger tensor is a run of its own: the pace is kept within it
            for at in range(0, max(first.nbytes, 1), _RUN_BYTES):
                part = [views[0][at : at + _RUN_BYTES], *views[1:]]
                self._pace.take(sum(view.nbytes for view in part))
                self._files.read(first.shard, first.begin + at, part)
            for i, view in zip(run, views, strict=True):
                checksums[i] = zlib.crc32(view)
                if not pieces[i].dtype:
                    continue
                buffer, begin = (whole, pieces[i].offset) if whole else (bytes(view), 0)
                element = first_not_finite(buffer, pieces[i].dtype, begin, view.nbytes)
                if element is not None:
                    raise self._files.not_finite(pieces[i], element)

        list(self._pool.map(read, consecutive_runs(pieces)))
        # after the bytes: what was read before a change was noticed must not be sent
        for shard in {piece.shard for piece in pieces}:
            self._files.check(shard)
        return checksums


def consecutive_runs(pieces: Sequence[Piece]) -> list[list[int]]:
    """Indices of pieces that follow each other in one file, in runs of about 16 MiB."""
    runs: list[list[int]] = []
    end = size = -1
    shard = -1
    for i in sorted(range(len(pieces)), key=lambda i: (pieces[i].shard, pieces[i].begin)):
        piece = pieces[i]
        if piece.shard == shard and piece.begin == end and size + piece.nbytes <= _RUN_BYTES:
            runs[-1].append(i)
            size += piece.nbytes
        else:
            runs.append([i])
            size = piece.nbytes
        shard, end = piece.shard, piece.begin + piece.nbytes
    return runs
