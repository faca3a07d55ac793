"""The reader that fills a GPU's slots, over a reader that fills ordinary memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.finite import NotFinite
from skyctl.transfer.gpu.carrier import DeviceChunkReader, merged, reads_of
from skyctl.transfer.gpu.reader import ReadBatch, ReadFailed, Span, cut
from skyctl.transfer.plan import ChunkPlan, plan_chunks
from skyctl.transfer.reader import CheckpointChanged, Filled, Pace, Piece, ShardFiles
from tests.unit.checkpoints.extremes import BAD, LARGEST
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


class MemoryReader:
    """Stands for the GPU: addresses are offsets into `memory`, and reads are done at once."""

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)

    def submit(self, batches: Iterable[ReadBatch]) -> None:
        for batch in batches:
            for span in (span for read in batch.reads for span in read.spans):
                data = os.pread(batch.files[span.file], span.size, span.file_offset)
                begin = batch.address + span.slot_offset
                self.memory[begin : begin + span.size] = data

    def wait(self, batch: Any, timeout_s: float) -> None:
        """Nothing is ever under way."""

    def slot_of(self, size: int) -> Callable[[int], torch.Tensor]:
        """Slots of `size` bytes, as the sender looks at them."""
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        return lambda slot: whole[slot * size : (slot + 1) * size]


def prepared(
    directory: Path, chunk_size: int, tensors: Any = None
) -> tuple[ChunkPlan, ShardFiles, list[list[Piece]]]:
    checkpoint = read_checkpoint(str(write_checkpoint(directory, tensors, shards=2)))
    plan = plan_chunks(checkpoint.tensors, chunk_size, alignment=1)
    chunks = [
        [
            Piece(p.tensor.shard, p.tensor.begin, p.tensor.nbytes, p.offset, p.tensor.dtype)
            for p in chunk.placed
        ]
        for chunk in plan.chunks
    ]
    return plan, ShardFiles(checkpoint.shards), chunks


@pytest.mark.parametrize("slots", [1, 2, 100])
def test_every_chunk_is_whole_in_its_slot_when_it_is_announced(tmp_path: Path, slots: int) -> None:
    plan, files, chunks = prepared(tmp_path / "c", 600)
    slots = min(slots, len(chunks))
    size = plan.slot_bytes
    device = MemoryReader(slots * size)
    mirrored: list[int] = []
    reader = DeviceChunkReader(
        files,
        chunks,
        list(map(reads_of, chunks)),
        [slot * size for slot in range(slots)],
        device,  # type: ignore[arg-type]
        pace=Pace(),
        after_fill=mirrored.append,
        bytes_of=device.slot_of(size),
    )
    expected = tiny_tensors()
    seen: list[int] = []

    def check(filled: Filled) -> None:
        base = filled.slot * size
        for placed in plan.chunks[filled.chunk].placed:
            begin = base + placed.offset
            data = bytes(device.memory[begin : begin + placed.tensor.nbytes])
            assert data == expected[placed.tensor.name][2]
        seen.append(filled.chunk)
        reader.release(filled.chunk)

    reader.run(check)
    assert seen == list(range(len(chunks)))
    assert mirrored == [chunk % slots for chunk in seen]


def test_one_reader_passes_on_what_it_has_read_and_checked(tmp_path: Path) -> None:
    plan, files, chunks = prepared(tmp_path / "c", 300)
    size = plan.slot_bytes
    passed: list[torch.Tensor] = []

    def reader(*, files: ShardFiles, reads: bool, pass_on: Callable[[Any], None]) -> Any:
        device = MemoryReader(len(chunks) * size)
        return device, DeviceChunkReader(
            files,
            chunks,
            [reads_of(chunk) if reads else [] for chunk in chunks],
            [slot * size for slot in range(len(chunks))],
            device,  # type: ignore[arg-type]
            pace=Pace(),
            after_fill=lambda slot: None,
            bytes_of=device.slot_of(size),
            pass_on=pass_on,
        )

    def receive(octets: torch.Tensor) -> None:
        octets.copy_(passed[len(received)])

    received: list[Filled] = []
    first, reads = reader(files=files, reads=True, pass_on=lambda octets: passed.append(octets))
    second, receives = reader(files=ShardFiles([]), reads=False, pass_on=receive)
    reads.run(lambda filled: None)
    receives.run(received.append)
    assert [filled.chunk for filled in received] == list(range(len(chunks)))
    assert any(first.memory) and first.memory == second.memory

    dtype, bad = BAD[0]
    tensors = {"bad": (dtype, (1,), bad)}
    _, files, chunks = prepared(tmp_path / "bad", 300, tensors)
    passed.clear()
    with pytest.raises(NotFinite):
        reader(files=files, reads=True, pass_on=passed.append)[1].run(lambda filled: None)
    assert not passed


def test_a_file_that_was_cut_is_named_rather_than_the_read_that_found_it(tmp_path: Path) -> None:
    plan, files, chunks = prepared(tmp_path / "c", 600)

    class Failing(MemoryReader):
        def wait(self, batch: Any, timeout_s: float) -> None:
            raise ReadFailed("/dev/fd/3 ended at byte 8")

    def run() -> None:
        DeviceChunkReader(
            files,
            chunks,
            list(map(reads_of, chunks)),
            [slot * plan.slot_bytes for slot in range(len(chunks))],
            Failing(len(chunks) * plan.slot_bytes),  # type: ignore[arg-type]
            pace=Pace(),
            after_fill=lambda slot: None,
            bytes_of=lambda slot: None,
        ).run(lambda filled: None)

    with pytest.raises(ReadFailed, match="ended at byte"):
        run()  # the files are as they were
    for shard in (tmp_path / "c").glob("*.safetensors"):
        os.truncate(shard, 100)
    with pytest.raises(CheckpointChanged, match="safetensors changed during the push"):
        run()


def test_a_slot_waits_for_its_release_and_a_stopped_reader_ends(tmp_path: Path) -> None:
    plan, files, chunks = prepared(tmp_path / "c", 300)
    device = MemoryReader(2 * plan.slot_bytes)
    reader = DeviceChunkReader(
        files,
        chunks,
        list(map(reads_of, chunks)),
        [0, plan.slot_bytes],
        device,  # type: ignore[arg-type]
        pace=Pace(),
        after_fill=lambda slot: None,
        bytes_of=device.slot_of(plan.slot_bytes),
    )
    seen: list[int] = []
    both = Event()

    def filled(slot: Filled) -> None:
        seen.append(slot.chunk)
        if len(seen) == 2:
            both.set()

    thread = Thread(target=reader.run, args=(filled,))
    thread.start()
    assert both.wait(10)
    reader.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == [0, 1]


@pytest.mark.parametrize("piece_bytes", [1, 4, 7, 100])
def test_spans_that_follow_each_other_in_memory_are_copied_at_once(piece_bytes: int) -> None:
    spans = [Span(3, 50, 9, 1000), Span(4, 0, 2, 1009), Span(3, 0, 5, 2000), Span(3, 5, 0, 2005)]
    reads = cut(spans, piece_bytes)
    copied = {
        span.slot_offset + at: (span.file, span.file_offset + at)
        for read in reads
        for span in read.spans
        for at in range(span.size)
    }
    assert copied == {
        span.slot_offset + at: (span.file, span.file_offset + at)
        for span in spans
        for at in range(span.size)
    }
    assert sum(read.size for read in reads) == 16
    for read in reads:
        assert read.size == sum(span.size for span in read.spans) <= piece_bytes
        followed = [span.slot_offset + span.size for span in read.spans]
        assert [span.slot_offset for span in read.spans] == [read.slot_offset, *followed[:-1]]
    assert len(reads) == -(-11 // piece_bytes) + -(-5 // piece_bytes)


def test_pieces_that_follow_each_other_on_disk_and_in_the_chunk_are_read_as_one() -> None:
    pieces = [
        Piece(0, 100, 10, 0),
        Piece(0, 110, 5, 10),
        Piece(0, 200, 5, 15),
        Piece(1, 205, 5, 20),
    ]
    assert merged(pieces) == [(0, 100, 15, 0), (0, 200, 5, 15), (1, 205, 5, 20)]


def read_all(tmp_path: Path, tensors: Any) -> list[int]:
    """The chunks that a reader of these tensors announces."""
    plan, files, chunks = prepared(tmp_path / "c", 100, tensors)
    device = MemoryReader(len(chunks) * plan.slot_bytes)
    reader = DeviceChunkReader(
        files,
        chunks,
        list(map(reads_of, chunks)),
        [slot * plan.slot_bytes for slot in range(len(chunks))],
        device,  # type: ignore[arg-type]
        pace=Pace(),
        after_fill=lambda slot: None,
        bytes_of=device.slot_of(plan.slot_bytes),
    )
    seen: list[int] = []
    reader.run(lambda filled: seen.append(filled.chunk))
    return seen


@pytest.mark.parametrize("before", [0, 1, 3], ids=["aligned", "at an odd byte", "at a third"])
@pytest.mark.parametrize(("dtype", "bad"), BAD)
def test_nan_and_infinity_stop_the_reader_before_the_chunk_is_announced(
    tmp_path: Path, dtype: str, bad: bytes, before: int
) -> None:
    good = LARGEST[dtype]
    tensors = {
        "a": ("U8", [before], b"\xff" * before),
        "b": (dtype, [5], good * 5),
        "c": (dtype, [5], good * 5),
        "d": ("I16", [2], b"\xff\x7f" * 2),
    }
    assert read_all(tmp_path, tensors)
    tensors["c"] = (dtype, [5], good * 3 + bad + good)
    with pytest.raises(NotFinite, match=r"safetensors: c holds NaN or infinity \(element 3\)"):
        read_all(tmp_path, tensors)
