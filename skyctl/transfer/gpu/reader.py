"""Files to GPU memory at close to the pinned-copy limit: parallel reads, a small ring, async copy.

Each thread owns `DEPTH` pinned buffers of `PIECE_BYTES` and one stream: it reads a piece with
preadv into a buffer while the copy engine drains the other. Spans that follow each other in device
memory, such as a mixture's experts, share a piece. The ring is small on purpose: it stays in the
last-level cache, which is worth a fifth of the rate, and pinning it is cheap. A piece is large
enough that passing on the interpreter lock, 0.09 ms each time, takes less than copying it.

With a dozen reader threads that lock is the limit, not the copy engine. torch's own calls hold it
for tens of microseconds, and a call that releases it waits up to 0.1 ms to get it back. So CUDA is
called straight through ctypes: calls that return at once keep the lock, and those that wait release
it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from skyctl.transfer.reader import DEPTH, PIECE_BYTES, THREADS, Pace

_HOST_TO_DEVICE, _EVENT_DISABLE_TIMING, _NOT_READY = 1, 2, 600  # CUDA's


class Span(NamedTuple):
    """`size` bytes of an open file, by its number, that go to one place of a slot."""

    file: int
    file_offset: int
    size: int
    slot_offset: int


class Read(NamedTuple):
    """One copy to the device: spans that follow each other in the slot."""

    slot_offset: int
    size: int
    spans: tuple[Span, ...]


class ReadFailed(Exception):
    """A file could not be read to the end of a span, or a copy failed."""


class ReadBatch:
    """Reads from `files` into the slot at a device address, at a `pace`. They are waited for
    together.
    """

    def __init__(
        self, reads: Sequence[Read], files: Sequence[int], address: int, pace: Pace | None = None
    ) -> None:
        self.reads = reads
        self.files = files
        self.address = address
        self.pace = pace or Pace()
        self.done = threading.Event()
        self._done_reads: list[Read] = []
        if not reads:
            self.done.set()

    def count_done(self, read: Read) -> None:
        """Record that a read is done, copied or not. Needs no lock: appending is atomic."""
        self._done_reads.append(read)
        if len(self._done_reads) == len(self.reads):
            self.done.set()


class DeviceReader:
    """Reads spans into one GPU's memory. `submit` returns at once; `wait` blocks for one batch.

    Batches complete in the order they were submitted. Not for use from several threads at once.
    Pinned host memory: threads x DEPTH x PIECE_BYTES.
    """

    def __init__(self, device: int, *, threads: int = THREADS) -> None:
        import torch

        self._device = device
        pinned_bytes = threads * DEPTH * PIECE_BYTES
        self._pinned = torch.empty(pinned_bytes, dtype=torch.uint8, pin_memory=True)
        self._streams = [torch.cuda.Stream(device=device) for _ in range(threads)]
        self._queue: SimpleQueue[tuple[Read, ReadBatch] | None] = SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(i,), daemon=True, name=f"reader-{i}")
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batches: Iterable[ReadBatch]) -> None:
        """Queue batches for `wait`. Submit all at once: making a batch while threads read holds
        these up.
        """
        for batch in batches:
            for read in batch.reads:
                self._queue.put((read, batch))

    def wait(self, batch: ReadBatch, timeout_s: float) -> None:
        """Block until every byte of the batch is in device memory.

        Raises:
            ReadFailed: a read or copy of any batch failed.
            TimeoutError: not within `timeout_s` seconds.
        """
        if not batch.done.wait(timeout_s):
            raise TimeoutError(f"reading to the GPU took more than {timeout_s:g} s")
        if self._failure is not None:
            raise ReadFailed(str(self._failure)) from self._failure

    def close(self) -> None:
        """Stop the threads and free the pinned ring."""
        self._closed = True  # queued pieces are no longer read
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(10)
        self._pinned = None
        self._streams = []

    def _work(self, number: int) -> None:
        _set_device(self._device)
        stream: int = self._streams[number].cuda_stream
        slots = [
            _Slot(self._pinned, (number * DEPTH + i) * PIECE_BYTES, PIECE_BYTES)
            for i in range(DEPTH)
        ]
        turn = 0
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                # count finished copies before sleeping: nothing else would
                for slot in slots:
                    self._finish_copy(slot)
                item = self._queue.get()
            if item is None:
                break
            slot = slots[turn]
            turn = (turn + 1) % DEPTH
            self._finish_copy(slot)
            slot.holds = read, batch = item
            if self._closed or self._failure is not None:
                continue
            try:
                batch.pace.take(read.size)
                slot.fill(read.spans, batch.files)
                target = batch.address + read.slot_offset
                copy_to_device(target, slot.address, read.size, stream)
                slot.event.record(stream)
            except BaseException as failure:
                self._failure = failure
        for slot in slots:
            self._finish_copy(slot)
            slot.event.destroy()

    def _finish_copy(self, slot: _Slot) -> None:
        """Wait for the slot's copy and count it in its batch."""
        holds, slot.holds = slot.holds, None
        if holds is None:
            return
        read, batch = holds
        try:
            slot.event.synchronize()
        except _CudaError as failure:
            self._failure = failure
        batch.count_done(read)


def cut(spans: Sequence[Span], size: int | None = None) -> list[Read]:
    """Reads of at most `size` bytes, PIECE_BYTES unless given: spans are cut, and joined where they
    follow each other in the slot.
    """
    size = size or PIECE_BYTES
    reads: list[Read] = []
    parts: list[Span] = []
    begin = end = 0
    for span in spans:
        at = 0
        while at < span.size:
            if parts and (end != span.slot_offset + at or end - begin == size):
                reads.append(Read(begin, end - begin, tuple(parts)))
                parts = []
            if not parts:
                begin = end = span.slot_offset + at
            take = min(begin + size - end, span.size - at)
            parts.append(Span(span.file, span.file_offset + at, take, end))
            at, end = at + take, end + take
    if parts:
        reads.append(Read(begin, end - begin, tuple(parts)))
    return reads


class _Slot:
    """One pinned buffer of a thread, and the copy that is draining it."""

    def __init__(self, pinned: Any, offset: int, size: int) -> None:
        piece = pinned[offset : offset + size]
        self.address: int = piece.data_ptr()
        self.view = memoryview(piece.numpy())
        self.event = _Event()
        self.holds: tuple[Read, ReadBatch] | None = None

    def fill(self, spans: Sequence[Span], files: Sequence[int]) -> None:
        begin = 0
        for span in spans:
            file, at = files[span.file], 0
            while at < span.size:
                into = self.view[begin + at : begin + span.size]
                got = os.preadv(file, [into], span.file_offset + at)
                if got <= 0:
                    name = Path(f"/proc/self/fd/{file}").readlink()
                    raise OSError(f"{name} ended at byte {span.file_offset + at}")
                at += got
            begin += span.size


class _CudaError(RuntimeError):
    """A CUDA runtime call returned an error code."""


@cache
def _runtime(*, waits: bool = False) -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded into this process."""
    import torch

    major = (torch.version.cuda or "13").split(".")[0]
    library = (ctypes.CDLL if waits else ctypes.PyDLL)(f"libcudart.so.{major}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    library.cudaEventCreateWithFlags.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
    library.cudaEventRecord.argtypes = [pointer, pointer]
    library.cudaEventQuery.argtypes = [pointer]
    library.cudaEventSynchronize.argtypes = [pointer]
    library.cudaEventDestroy.argtypes = [pointer]
    library.cudaStreamSynchronize.argtypes = [pointer]
    library.cudaSetDevice.argtypes = [ctypes.c_int]
    library.cudaGetErrorString.argtypes = [ctypes.c_int]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int, call: str) -> None:
    if code:
        text = _runtime().cudaGetErrorString(code).decode()
        raise _CudaError(f"{call}: {text} (CUDA error {code})")


def _set_device(index: int) -> None:
    """Bind the calling thread to one GPU."""
    _check(_runtime().cudaSetDevice(index), "cudaSetDevice")


def copy_to_device(device_address: int, host_address: int, size: int, stream: int) -> None:
    """Start copying `size` bytes from pinned host memory; returns before the copy is done."""
    code = _runtime().cudaMemcpyAsync(device_address, host_address, size, _HOST_TO_DEVICE, stream)
    _check(code, "cudaMemcpyAsync")


class _Event:
    """A CUDA event without timing. Create it on the thread (and so the device) that records it."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        code = _runtime().cudaEventCreateWithFlags(
            ctypes.byref(self._handle), _EVENT_DISABLE_TIMING
        )
        _check(code, "cudaEventCreate")

    def record(self, stream: int) -> None:
        _check(_runtime().cudaEventRecord(self._handle, stream), "cudaEventRecord")

    def synchronize(self) -> None:
        code = _runtime().cudaEventQuery(self._handle)
        if code == _NOT_READY:
            code = _runtime(waits=True).cudaEventSynchronize(self._handle)
        _check(code, "cudaEventSynchronize")

    def destroy(self) -> None:
        _runtime().cudaEventDestroy(self._handle)
