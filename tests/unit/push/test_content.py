"""The content digest covers every byte of a checkpoint, and nothing else."""

from __future__ import annotations

from pathlib import Path

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.push.source import content_digest, read_content
from tests.unit.push.checkpoints import rewrite_unseen, tiny_tensors, write_checkpoint


def test_the_content_digest_follows_the_bytes_and_not_the_files(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "a", tiny_tensors())))
    copied = read_checkpoint(str(write_checkpoint(tmp_path / "b", tiny_tensors())))
    digest = read_content(checkpoint)
    assert digest == read_content(copied)
    rewrite_unseen(tmp_path / "b", tiny_tensors(7))
    assert read_content(read_checkpoint(str(tmp_path / "b"))) != digest
    assert content_digest(checkpoint.tensors, {}) == ""
