"""Which checkpoint of a training run is pushed next: the newest one that is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.errors import NotFoundError, PreflightError, SkyctlError
from skyctl.push.source import read_content
from skyctl.store.journal import PushRecord
from skyctl.store.kept_weights import KeptWeights

_DEEPEST = 3
"""Levels below the directory: `global_step_20/actor/huggingface`."""
_UNFINISHED = (".", "tmp-", "tmp_")
"""How the names begin under which trainers write before they rename."""


class Watched:
    """A training run's directory. A checkpoint is whole once its index, headers and sizes agree,
    and its files are what they were at the last scan.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._last_scan: dict[Path, str] = {}
        self._refused: dict[Path, str] = {}
        self._same_content: dict[str, bool] = {}

    def next(self, pushes: Sequence[PushRecord], kept: Sequence[KeptWeights]) -> Checkpoint | None:
        """The newest that is whole and was neither pushed nor refused; None if one that was pushed
        is newer. `pushes` are those of the fleet's history, `kept` the fleet's own copies. Call it
        at intervals: two scans decide.
        """
        done = [_of_source(push, kept) for push in pushes if push.ok]
        last_scan, self._last_scan = self._last_scan, {}
        for path in sorted(_checkpoints(self.directory), key=_written_at, reverse=True):
            try:
                checkpoint = read_checkpoint(str(path))
            except (PreflightError, NotFoundError, OSError):
                continue  # still being written, or being deleted
            identity = checkpoint.identity_digest
            self._last_scan[path] = identity
            if any(push.checkpoint_digest == identity for push in done):
                return None
            if last_scan.get(path) != identity or self._refused.get(path) == identity:
                continue
            return None if self._has_content_of(checkpoint, done) else checkpoint
        return None

    def _has_content_of(self, checkpoint: Checkpoint, done: Sequence[PushRecord]) -> bool:
        """Whether its files were only copied or touched since they were pushed; it reads them."""
        contents = {push.content_digest for push in done if push.checkpoint == str(checkpoint.path)}
        if not contents - {""}:
            return False
        identity = checkpoint.identity_digest
        if identity not in self._same_content:
            try:
                self._same_content[identity] = read_content(checkpoint) in contents
            except (SkyctlError, OSError):
                return False  # the push reports it
        return self._same_content[identity]

    def refuse(self, checkpoint: Checkpoint) -> None:
        """Do not return it again before its files change."""
        self._refused[checkpoint.path] = checkpoint.identity_digest


def _of_source(push: PushRecord, kept: Sequence[KeptWeights]) -> PushRecord:
    """A push from the fleet's own copy (`--keep`) as one of the files that the copy was made of."""
    for own in kept:
        if (own.checkpoint, own.checkpoint_digest) == (push.checkpoint, push.checkpoint_digest):
            return replace(push, checkpoint=own.source, checkpoint_digest=own.source_digest)
    return push


def _checkpoints(directory: Path, depth: int = _DEEPEST) -> Iterator[Path]:
    """The directories below that hold a config.json, but for those within others."""
    try:
        with os.scandir(directory) as entries:
            below = [
                Path(entry.path)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(_UNFINISHED)
            ]
    except OSError:
        return
    for path in below:
        if (path / "config.json").exists():
            yield path
        elif depth > 1:
            yield from _checkpoints(path, depth - 1)


def _written_at(path: Path) -> tuple[float, str]:
    """When its weights were written last; of two at the same time, the longer number is newer."""
    written_at = 0.0
    for shard in path.glob("*.safetensors"):
        try:
            written_at = max(written_at, shard.stat().st_mtime)
        except OSError:
            continue
    number = "".join(sign for sign in path.name if sign.isdigit())
    return written_at, number.zfill(20)
