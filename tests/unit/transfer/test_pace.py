"""How fast a sender reads beside serving: on a clock that moves only where somebody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.transfer import reader
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import ChunkReader, Pace, Piece, ShardFiles
from tests.unit.push.checkpoints import write_checkpoint


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.late_s = 0.0  # by which waits end too late

    def wait(self, seconds: float) -> None:
        self.now += seconds + self.late_s

    def pace(self, rate: float | None) -> Pace:
        return Pace(rate, clock=lambda: self.now, wait=self.wait)


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_reads_follow_each_other_at_the_rate_even_where_waits_end_late(late_s: float) -> None:
    clock = Clock()
    clock.late_s = late_s
    pace = clock.pace(1000)
    for _ in range(10):
        pace.take(500)  # half a second each
    assert clock.now - 100.0 == pytest.approx(9 * 0.5 + late_s)


def test_what_is_not_used_is_not_saved_up() -> None:
    clock = Clock()
    pace = clock.pace(1000)
    pace.take(1000)
    clock.now += 60  # the disk was slower
    pace.take(1000)
    assert clock.now == 160
    pace.take(1000)
    assert clock.now == 161


def test_without_a_rate_and_once_it_is_lifted_nobody_waits() -> None:
    clock = Clock()
    clock.pace(None).take(1 << 40)
    pace = clock.pace(1)
    pace.take(1 << 40)
    pace.lift()
    pace.take(1 << 40)
    assert clock.now == 100.0


def test_a_reader_takes_every_byte_at_its_pace(tmp_path: Path) -> None:
    clock = Clock()
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "a", shards=2)))
    plan = plan_chunks(checkpoint.tensors, 1024)
    chunks = [
        [Piece(p.tensor.shard, p.tensor.begin, p.tensor.nbytes, p.offset) for p in chunk.placed]
        for chunk in plan.chunks
    ]
    slots = [memoryview(bytearray(plan.slot_bytes)) for _ in chunks]
    files = ShardFiles(checkpoint.shards)
    pace = clock.pace(1000)
    ChunkReader(files, chunks, slots, threads=1, pace=pace).run(lambda filled: None)
    pace.take(1)  # after all of them
    files.close()
    assert clock.now - 100.0 == pytest.approx(checkpoint.total_bytes / 1000)


def test_the_pace_is_kept_within_a_tensor_that_is_larger_than_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_RUN_BYTES", 1000)
    data = bytes(range(250)) * 10
    path = write_checkpoint(tmp_path / "a", {"large": ("U8", [2500], data)})
    checkpoint = read_checkpoint(str(path))
    [tensor] = checkpoint.tensors
    clock, slot = Clock(), bytearray(2500)
    files = ShardFiles(checkpoint.shards)
    chunks = [[Piece(0, tensor.begin, tensor.nbytes, 0)]]
    pace = clock.pace(1000)
    ChunkReader(files, chunks, [memoryview(slot)], threads=1, pace=pace).run(lambda filled: None)
    files.close()
    assert slot == data
    assert clock.now - 100.0 == pytest.approx(2.0)  # the last of three reads begins
