"""What `sync-weights --watch` takes for a finished checkpoint, and which of several it pushes."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core.watching import Watched
from skyctl.push.source import read_content
from skyctl.store.journal import PushRecord
from skyctl.store.kept_weights import KeptWeights
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


class Run:
    """A training run that writes checkpoints, each later than the one before."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.watched = Watched(directory)
        self.pushes: list[PushRecord] = []
        self.kept: list[KeptWeights] = []
        self._clock = 1_000_000_000

    def write(self, name: str, seed: int = 1) -> Path:
        path = self.directory / name
        path.mkdir(parents=True)
        write_checkpoint(path, tiny_tensors(seed))
        self.touch(path)
        return path

    def touch(self, path: Path) -> None:
        self._clock += 10
        for file in path.glob("*.safetensors"):
            os.utime(file, (self._clock, self._clock))

    def look(self) -> str | None:
        checkpoint = self.watched.next(self.pushes, self.kept)
        return None if checkpoint is None else checkpoint.path.name

    def push(self) -> str | None:
        """Look until a checkpoint is chosen, and have it pushed."""
        self.look()
        checkpoint = self.watched.next(self.pushes, self.kept)
        if checkpoint is None:
            return None
        record = PushRecord(
            *("push-1", 0.0, True, checkpoint.name, str(checkpoint.path)),
            checkpoint.identity_digest,
            {"content_digest": read_content(checkpoint)},
        )
        self.pushes.insert(0, record)
        return checkpoint.path.name

    def keep(self) -> None:
        """The latest push was made from a copy of the fleet's own (`--keep`)."""
        record = self.pushes[0]
        copy = str(self.directory.parent / "kept" / Path(record.checkpoint).name)
        digests = f"copy of {record.checkpoint_digest}", str(record.checkpoint_digest)
        self.pushes[0] = replace(record, checkpoint=copy, checkpoint_digest=digests[0])
        kept = KeptWeights("v", copy, record.checkpoint, *digests, record.content_digest, 1, 0.0)
        self.kept.insert(0, kept)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_newest_is_pushed_and_the_older_ones_are_not(run: Run) -> None:
    for step in (10, 9, 100):
        run.write(f"checkpoint-{step}", step)
    assert run.push() == "checkpoint-100"
    assert run.push() is None
    run.write("global_step_101/actor/huggingface", 101)
    assert run.push() == "huggingface"


def test_of_two_of_one_time_the_higher_step_is_newer(run: Run) -> None:
    first, second = run.write("checkpoint-9"), run.write("checkpoint-10", 2)
    for file in (*first.glob("*.safetensors"), *second.glob("*.safetensors")):
        os.utime(file, (1_000_000_000, 1_000_000_000))
    assert run.push() == "checkpoint-10"


def test_a_checkpoint_is_whole_only_at_the_second_look(run: Run) -> None:
    path = run.write("checkpoint-1")
    assert run.look() is None
    run.touch(path)  # it is still being written
    assert [run.look(), run.look()] == [None, "checkpoint-1"]


def test_what_is_still_being_written_waits_while_an_older_one_is_pushed(run: Run) -> None:
    run.write("checkpoint-1")
    new = run.write("checkpoint-2", 2)
    shards = sorted(new.glob("*.safetensors"))
    whole = shards[-1].read_bytes()
    shards[-1].write_bytes(whole[:-1])
    assert run.push() == "checkpoint-1"
    shards[-1].unlink()
    assert run.push() is None
    shards[-1].write_bytes(whole)
    run.touch(new)
    assert run.push() == "checkpoint-2"


@pytest.mark.parametrize("name", ["tmp-checkpoint-3", ".checkpoint-3"])
def test_a_directory_that_will_be_renamed_is_not_looked_at(run: Run, name: str) -> None:
    path = run.write(name)
    assert run.push() is None
    path.rename(run.directory / "checkpoint-3")
    assert run.push() == "checkpoint-3"


def test_what_the_history_has_is_not_pushed_again(run: Run) -> None:
    path = run.write("checkpoint-1")
    assert run.push() == "checkpoint-1"
    run.watched = Watched(run.directory)  # another command
    assert run.push() is None
    run.touch(path)  # by content: only the times differ
    assert run.push() is None
    shutil.rmtree(path)
    run.write("checkpoint-1", 2)
    assert run.push() == "checkpoint-1"


def test_what_was_pushed_from_the_fleets_own_copy_is_not_pushed_again(run: Run) -> None:
    path = run.write("checkpoint-1")
    assert run.push() == "checkpoint-1"
    run.keep()
    assert run.push() is None
    run.touch(path)
    assert run.push() is None
    run.write("checkpoint-2", 2)
    assert run.push() == "checkpoint-2"


def test_a_refused_checkpoint_waits_for_a_change_and_the_next_older_takes_its_place(
    run: Run,
) -> None:
    run.write("checkpoint-1")
    bad = run.write("checkpoint-2", 2)
    run.look()
    checkpoint = run.watched.next([], [])
    assert checkpoint is not None and checkpoint.path == bad
    run.watched.refuse(checkpoint)
    run.look()
    assert run.look() == "checkpoint-1"
    run.touch(bad)
    assert run.push() == "checkpoint-2"


def test_adapters_files_and_links_are_no_checkpoints(run: Run) -> None:
    path = run.write("kept/checkpoint-1")
    (run.directory / "latest").symlink_to(path)
    (run.directory / "adapter").mkdir()
    (run.directory / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (run.directory / "config.json").write_text("{}")
    assert run.push() == "checkpoint-1"
    assert run.push() is None
