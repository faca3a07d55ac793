"""Where weights from a trainer's memory are kept until the fleet no longer needs them.

    <fleet>/weights/<id>/.lock     held (flock, shared) by every process that writes or pushes it
    <fleet>/weights/<id>/live      the checkpoint: a directory, or a link to one in /dev/shm

An entry lives while a process holds it or the fleet's state names it; `sweep` removes all others.
The kernel drops the lock of a process that dies, however it dies, so nothing is left behind for
longer than until the next push, `up` or `down`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from skyctl.errors import SkyctlError
from skyctl.launch.local.devices import available_memory
from skyctl.store.owned import FileLock
from skyctl.store.paths import create_private_file, private_directory
from skyctl.units import format_bytes

MEMORY_ROOT = Path("/dev/shm")
LIVE = "live"
_LOCK = ".lock"
_ORIGIN = ".origin"
_TRIES = 10
# what must stay free beside the weights themselves, as a share of them
_HEADROOM = 0.25


class StagedEntry:
    """A private checkpoint directory at `path` that this process keeps from being swept."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    def claim(self, invalidate: Callable[[], None]) -> bool:
        """Whether no other process reads it; then `invalidate` makes it unreadable for those that
        come later. None of them waits while it is written.
        """
        try:
            if not self._lock.take():
                return False
            invalidate()
            return True
        finally:
            self._lock.take(shared=True, wait=True)  # one that could not be converted is lost

    def close(self) -> None:
        """The entry goes with the next sweep, unless the fleet's state names it by then."""
        self._lock.close()


@contextmanager
def staged(
    directory: Path,
    *,
    needed_bytes: int | None,
    in_memory: bool = True,
    memory_root: Path = MEMORY_ROOT,
) -> Iterator[Path]:
    """The path of a `staged_entry`, held while the block runs."""
    entry = staged_entry(
        directory, needed_bytes=needed_bytes, in_memory=in_memory, memory_root=memory_root
    )
    try:
        yield entry.path
    finally:
        entry.close()


def staged_entry(
    directory: Path,
    *,
    needed_bytes: int | None,
    in_memory: bool = True,
    memory_root: Path = MEMORY_ROOT,
) -> StagedEntry:
    """A new, empty, private checkpoint directory.

    With `in_memory` it is in a tmpfs (at `memory_root`) if `needed_bytes` are known and fit there
    with room to spare, else below `directory`.

    Raises:
        SkyctlError: it cannot be made, or there is no room for it.
    """
    private_directory(directory)
    entry, lock = _new_entry(directory)
    try:
        if in_memory and needed_bytes is not None and _fits_in_memory(memory_root, needed_bytes):
            (entry / LIVE).symlink_to(_memory_directory(memory_root, entry))
        else:
            _require_room(directory, needed_bytes or 0)
            (entry / LIVE).mkdir(mode=0o700)
    except BaseException:
        lock.close()
        raise
    return StagedEntry(entry / LIVE, lock)


def is_staged(path: str) -> bool:
    """Whether this is an entry that `staged` made."""
    return Path(path).name == LIVE and os.path.exists(Path(path).parent / _LOCK)  # noqa: PTH110


def without_links(path: str) -> str:
    """The directory that a path leads to now: its links may lead elsewhere later. The link of a
    staged checkpoint stays, because it never moves.
    """
    return path if is_staged(path) else os.path.realpath(path)


@contextmanager
def in_use(checkpoint: str) -> Iterator[None]:
    """Keep a staged checkpoint from being swept while the block runs. Other paths are ignored."""
    if not is_staged(checkpoint):
        yield
        return
    with _lock_of(Path(checkpoint).parent / _LOCK) as keeping:
        keeping.take(shared=True, wait=True)
        yield


def sweep(
    directory: Path, keep: Collection[str | None], *, memory_root: Path = MEMORY_ROOT
) -> None:
    """Remove every entry that is not in use and not in `keep` (checkpoint paths)."""
    entries = [entry for entry in _list(directory) if entry.is_dir()]
    for entry in entries:
        if str(entry / LIVE) not in keep:
            _remove_unless_in_use(entry, memory_root)
    _sweep_memory(memory_root)


def _new_entry(directory: Path) -> tuple[Path, FileLock]:
    """A new entry and its lock, taken."""
    for _ in range(_TRIES):
        entry = directory / secrets.token_hex(8)
        entry.mkdir(mode=0o700)
        with suppress(FileNotFoundError, SkyctlError):  # a sweep took the empty entry
            path = entry / _LOCK
            lock = FileLock(path, partial(create_private_file, path))
            lock.take(shared=True, wait=True)
            if _same_file(lock.fileno(), path):
                return entry, lock
            lock.close()
    raise SkyctlError(f"cannot make a directory for weights in {directory}")


def _lock_of(path: Path) -> FileLock:
    """The lock of an entry that exists."""
    return FileLock(path, lambda: os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_unless_in_use(entry: Path, memory_root: Path) -> None:
    try:
        lock = _lock_of(entry / _LOCK)
    except FileNotFoundError:
        with suppress(OSError):  # being made just now, or left by a killed process
            entry.rmdir()
        return
    with lock:
        if lock.take():
            shutil.rmtree(_memory_home(memory_root) / entry.name, ignore_errors=True)
            (_memory_home(memory_root) / f"{entry.name}{_ORIGIN}").unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)


def _memory_home(memory_root: Path) -> Path:
    """All fleets of this user share it. It stays when it is empty, because another fleet may be
    about to use it.
    """
    return memory_root / f"skyctl-{os.getuid()}"


def _memory_directory(memory_root: Path, entry: Path) -> Path:
    """A directory in memory for an entry. Its owner is recorded before it is made."""
    home = private_directory(_memory_home(memory_root))
    (home / f"{entry.name}{_ORIGIN}").symlink_to(entry)
    directory = home / entry.name
    directory.mkdir(mode=0o700)
    return directory


def _sweep_memory(memory_root: Path) -> None:
    """Remove memory of entries that are gone because a state directory was removed."""
    for origin in _list(_memory_home(memory_root)):
        if origin.suffix == _ORIGIN and origin.is_symlink() and not origin.exists():
            shutil.rmtree(origin.with_suffix(""), ignore_errors=True)
            origin.unlink(missing_ok=True)


def _list(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:  # removed just now, perhaps: others sweep as well
        return []


def _fits_in_memory(memory_root: Path, needed_bytes: int) -> bool:
    try:
        free = min(shutil.disk_usage(memory_root).free, available_memory() or 0)
    except OSError:
        return False
    return needed_bytes * (1 + _HEADROOM) <= free


def _require_room(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise SkyctlError(
            f"{format_bytes(needed_bytes)} of weights do not fit in {directory}: "
            f"{format_bytes(free)} are free",
            hint="make room there, or point SKYCTL_HOME elsewhere",
        )
