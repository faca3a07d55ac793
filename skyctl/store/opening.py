"""How a state file is opened: normally, or as a copy in memory if its disk fails."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.store.owned import FileLock
from skyctl.store.paths import create_private_file, place_private_file
from skyctl.store.schema import create_tables

BUSY_TIMEOUT_S = 10.0
WAL_LIMIT_BYTES = 4 * 1024 * 1024

Connect = Callable[[Path], sqlite3.Connection]

_DISK = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)


def connect(path: Path) -> sqlite3.Connection:
    """SQLite's own connection; every statement outside a transaction commits by itself."""
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def disk_failed(error: BaseException) -> bool:
    """Whether the disk is at fault (full, read-only, I/O error), not the request."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, sqlite3.Error):
        return code is not None and code & 0xFF in _DISK
    return isinstance(error, OSError | StateUnwritable)


def open_file(path: Path, connect: Connect = connect, *, owner: bool = False) -> sqlite3.Connection:
    """A connection to the state file, which is created if there is none.

    The `owner` checks all of it, and raises DatabaseError if it is corrupt.
    """
    _create(path)
    connection = connect(path)
    connection.row_factory = sqlite3.Row
    try:
        _enable_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        if owner and connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("integrity check failed")
        create_tables(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def in_memory(source: sqlite3.Connection | None = None) -> sqlite3.Connection:
    """A connection to a database in memory: a copy of `source`, or an empty one."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    memory.row_factory = sqlite3.Row
    try:
        if source is not None:
            source.backup(memory)
    except BaseException:
        memory.close()
        raise
    return memory


def read_into_memory(path: Path) -> sqlite3.Connection:
    """The content of a file that cannot be opened for writing.

    Raises:
        sqlite3.Error, OSError: it cannot be read either.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        memory = in_memory()
    else:
        memory = _copy_of(path)
    create_tables(memory, path)
    return memory


def keep_aside(path: Path, connect: Connect) -> Path | None:
    """Move a corrupt file (and its WAL) away; None if another process already did."""
    lock = path.with_suffix(".lock")
    with FileLock(lock, lambda: create_private_file(lock)) as moving:
        moving.take(wait=True)
        try:
            open_file(path, connect, owner=True).close()
            return None
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            kept = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}")
            path.rename(kept)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return kept


def _create(path: Path) -> None:
    """Create an empty file, mode 0600, unless there is one.

    Never opened beside SQLite's own connections: a process that closes any descriptor of a database
    loses the locks that its connections have on it, and the next other process to close one removes
    the WAL that they go on writing to (sqlite.org/howtocorrupt.html, section 2.2).
    """
    if path.is_symlink():
        raise SkyctlError(f"cannot open {path}: it is a symlink")
    if not path.exists():
        place_private_file(path)


def _enable_wal(connection: sqlite3.Connection) -> None:
    # switching to WAL does not honour the busy timeout while another process does the same
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _copy_of(path: Path) -> sqlite3.Connection:
    """A copy of a file in memory, even if there is no room beside it for its WAL index."""
    for alone in (False, True):
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(connect(path)) as source,
        ):
            if alone:  # the WAL index is then in memory, where only one connection can have it
                source.execute("PRAGMA locking_mode = EXCLUSIVE")
            return in_memory(source)
    with _elsewhere(path) as copy, contextlib.closing(connect(copy)) as source:
        return in_memory(source)


@contextlib.contextmanager
def _elsewhere(path: Path) -> Iterator[Path]:
    """A copy of the file and its WAL, for a read-only file system: no process writes to them."""
    with tempfile.TemporaryDirectory(prefix="skyctl-") as directory:
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", Path(directory, f"{path.name}{suffix}"))
        yield Path(directory, path.name)
