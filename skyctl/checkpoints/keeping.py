"""The fleet's own copy of a checkpoint, which no other program deletes or overwrites.

    <fleet>/kept/<id>/<name>      config, tokenizer and shards, as in the directory <name>
    <fleet>/kept/<id>/.recorded   it was on record: it outlives a state file that is lost

It is a copy, not a hard link: a trainer that writes the next step into the same file would change
what a link shows. If the file system can share blocks (XFS, Btrfs), the kernel does, and the copy
costs nothing; elsewhere it costs its size on disk, and the time to write it, while servers serve.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import BinaryIO

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.errors import PreflightError, SkyctlError
from skyctl.store.paths import private_directory, sync_directory
from skyctl.units import format_bytes

_SMALL = (".json", ".txt", ".model", ".jinja", ".py")
"""Suffixes of files beside the shards that belong to the model; not a trainer's own state."""
_PIECE_BYTES = 256 * 1024 * 1024
_RECORDED = ".recorded"


def keep_copy(
    source: Checkpoint,
    directory: Path,
    recorded: Collection[str | None],
    *,
    stop: Event | None = None,
) -> Path:
    """Copy a checkpoint into `directory`; returns the copy's path. `recorded` are recorded copies:
    others were left by a push that died, and are removed first. An interrupted copy leaves nothing.
    `stop` interrupts it from another thread.

    Raises:
        PreflightError: there is no room, or the source changed during the copy.
        SkyctlError: it cannot be written, or `stop` was set.
    """
    private_directory(directory)
    sweep_kept(directory, recorded)
    needed = sum(path.stat().st_size for path in _files(source))
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise PreflightError(
            f"{format_bytes(needed)} do not fit in {directory}: {format_bytes(free)} are free",
            hint="skyctl weights kept; skyctl weights forget VERSION; or push without --keep",
        )
    entry = directory.resolve() / secrets.token_hex(8)  # pushes record paths without links
    try:
        entry.mkdir(mode=0o700)
        copy = entry / source.name
        copy.mkdir(mode=0o700)
        for path in _files(source):
            _copy(path, copy / path.name, stop or Event())
        sync_directory(copy)
        sync_directory(entry)
        if read_checkpoint(str(source.path)).identity_digest != source.identity_digest:
            raise PreflightError(f"{source.path} changed while it was copied")
    except BaseException as error:
        shutil.rmtree(entry, ignore_errors=True)
        if isinstance(error, OSError):
            raise SkyctlError(
                f"{source.path} cannot be kept: {error.strerror or error}",
                hint="push without --keep, or point SKYCTL_HOME at another disk",
            ) from error
        raise
    return copy


def delete_copy(copy: Path, directory: Path) -> None:
    """Remove a copy that `keep_copy` made in `directory`; anything else is left alone."""
    if copy.parent.parent.resolve() == directory.resolve():
        with suppress(OSError):  # first: what is left if this process dies goes with the next sweep
            (copy.parent / _RECORDED).unlink(missing_ok=True)
        shutil.rmtree(copy.parent, ignore_errors=True)


def sweep_kept(directory: Path, recorded: Collection[str | None]) -> None:
    """Remove every copy that is not recorded, and never was."""
    names = {Path(path).parent.name for path in recorded if path}
    for entry in directory.iterdir() if directory.is_dir() else ():
        kept = entry.name in names or (entry / _RECORDED).exists()
        if entry.is_dir() and not kept:
            shutil.rmtree(entry, ignore_errors=True)


def mark_recorded(copy: Path) -> None:
    """A copy that `keep_copy` made is on record."""
    with suppress(OSError):  # a full disk: it is on record all the same
        (copy.parent / _RECORDED).touch(mode=0o600)


def _files(source: Checkpoint) -> list[Path]:
    """The shards, by their names in the directory, and the small files beside them."""
    shards = {Path(shard.path) for shard in source.shards}
    return [
        path
        for path in sorted(source.path.iterdir())
        if path.is_file() and (path.suffix in _SMALL or path.resolve() in shards)
    ]


def copy_small_files(source: Path, target: Path) -> None:
    """Copy what belongs to the model at `source`, except its weights and config.json."""
    for path in sorted(source.iterdir()):
        index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _SMALL and path.name != "config.json" and not index:
            shutil.copyfile(path, target / path.name)


class _Stoppable:
    """A file that is read until `stop` is set; raises SkyctlError then."""

    def __init__(self, file: BinaryIO, stop: Event) -> None:
        self._file = file
        self._stop = stop

    def check(self) -> None:
        if self._stop.is_set():
            raise SkyctlError(f"the copy of {self._file.name} was stopped")

    def read(self, size: int = -1, /) -> bytes:
        self.check()
        return self._file.read(size)


def _copy(source: Path, target: Path, stop: Event) -> None:
    """Copy one file durably; blocks are shared if the file system can."""
    with source.open("rb") as read, target.open("xb") as write:
        pieces = _Stoppable(read, stop)
        os.fchmod(write.fileno(), 0o600)
        remaining = os.fstat(read.fileno()).st_size
        try:
            while remaining > 0:
                size = min(remaining, _PIECE_BYTES)
                pieces.check()
                done = os.copy_file_range(read.fileno(), write.fileno(), size)
                if done == 0:
                    raise OSError(f"{source}: the kernel copies nothing")
                remaining -= done
        except OSError:  # a file system that cannot; a real error shows again below
            read.seek(0)
            write.seek(0)
            write.truncate()
            shutil.copyfileobj(pieces, write, 16 * 1024 * 1024)
        write.flush()
        os.fsync(write.fileno())
