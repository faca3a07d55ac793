"""The SQLite file behind a fleet's state: schema, versions, and what happens when it is broken."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.store.paths import create_private_file, place_private_file, private_directory

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 10.0

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE processes (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, phase TEXT NOT NULL, token TEXT NOT NULL,
    pid INTEGER, create_time REAL, boot_id TEXT, spec_hash TEXT NOT NULL,
    host TEXT NOT NULL, port INTEGER NOT NULL, gpus TEXT NOT NULL, started_at REAL NOT NULL,
    descendants TEXT NOT NULL DEFAULT '[]');
CREATE TABLE servers (
    name TEXT PRIMARY KEY, paused INTEGER NOT NULL, sleep_level INTEGER NOT NULL,
    weight_version TEXT, checkpoint TEXT, checkpoint_digest TEXT, weights_digest TEXT,
    quarantine TEXT);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, state TEXT NOT NULL,
    stage TEXT NOT NULL, done_bytes INTEGER NOT NULL, total_bytes INTEGER NOT NULL,
    request TEXT NOT NULL, servers TEXT NOT NULL, created_at REAL NOT NULL, finished_at REAL,
    error TEXT, result TEXT, owner TEXT NOT NULL);
CREATE TABLE job_events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL, at REAL NOT NULL,
    kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE INDEX job_events_of ON job_events (job, sequence);
CREATE TABLE pushes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, at REAL NOT NULL,
    ok INTEGER NOT NULL, version TEXT, checkpoint TEXT NOT NULL, checkpoint_digest TEXT,
    result TEXT NOT NULL);
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, subject TEXT NOT NULL,
    message TEXT NOT NULL);
CREATE TABLE locks (
    name TEXT PRIMARY KEY, pid INTEGER NOT NULL, create_time REAL NOT NULL,
    boot_id TEXT NOT NULL, holder TEXT NOT NULL, since REAL NOT NULL);
"""


P = ParamSpec("P")
R = TypeVar("R")


def understood(read: Callable[P, R]) -> Callable[P, R]:
    """A method that makes something of rows; its class has a `_database` (see `understanding`)."""

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R:
        own: Any = args[0]
        database: Database = own._database
        with database.understanding():
            return read(*args, **kwargs)

    return reading


class Database:
    """One connection to a fleet's state file, for one thread. Every write is a transaction.

    `warn` hears one line when a broken file was kept aside and a new one `begun_anew`.

    Raises:
        SkyctlError: the file was written by a newer skyctl, or cannot be opened.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] = lambda line: None) -> None:
        self.path = path
        self.begun_anew = False
        private_directory(path.parent)
        try:
            self._connection = _open(path)
        except sqlite3.OperationalError as error:
            raise SkyctlError(f"cannot open {path}: {error}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            kept = _keep_aside(path)
            if kept is not None:
                self.begun_anew = True
                warn(f"{path} was corrupt ({error}); kept as {kept.name} and begun anew")
            self._connection = _open(path)

    def close(self) -> None:
        self._connection.close()

    def rows(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        """Every row of a query."""
        with self._readable():
            return self.write(sql, *parameters).fetchall()

    def row(self, sql: str, *parameters: Any) -> sqlite3.Row | None:
        """The first row of a query, None when there is none."""
        with self._readable():
            found: sqlite3.Row | None = self.write(sql, *parameters).fetchone()
        return found

    def write(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        """One statement, committed when it returns (unless in a `transaction`).

        Raises:
            SkyctlError: the file cannot be read or written (disk full, locked for too long …).
        """
        with self._readable():
            return self._connection.execute(sql, parameters)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        # UnicodeDecodeError: SQLite's own words quote what is damaged
        except (sqlite3.OperationalError, UnicodeDecodeError) as error:
            raise SkyctlError(f"cannot use {self.path}: {error}") from error
        except (sqlite3.DatabaseError, OverflowError) as error:
            raise damaged(self.path, error) from error

    @contextmanager
    def understanding(self) -> Iterator[None]:
        """Around code that makes something of rows: what skyctl did not write is a SkyctlError."""
        try:
            yield
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise damaged(self.path, error) from error

    @contextmanager
    def durable(self) -> Iterator[None]:
        """What is written inside is on the disk when the block ends.

        Raises:
            StateUnwritable: it is not; nothing of it is kept.
        """
        try:
            yield
        except SkyctlError as error:
            raise StateUnwritable(
                error.message, hint=f"free space, or make {self.path.parent} writable"
            ) from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is committed together or not at all; other writers wait.

        One inside another is part of it.
        """
        if self._connection.in_transaction:
            yield
            return
        self.write("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.rollback()
            raise
        self.write("COMMIT")


def damaged(path: Path, error: Exception) -> SkyctlError:
    """The error of a state file that opens and does not make sense."""
    return SkyctlError(
        f"{path} is damaged: {' '.join(str(error).split())[:200]}",
        hint=f"mv {path} {path}.damaged; then: skyctl recover",
    )


def _create(path: Path) -> None:
    """An empty file, mode 0600, unless there is one.

    Never opened beside SQLite's own connections: a process that closes any descriptor of
    a database loses the locks that its connections have on it, and the next other process to close
    one removes the WAL that they go on writing to (sqlite.org/howtocorrupt.html, section 2.2).
    """
    if path.is_symlink():
        raise SkyctlError(f"cannot open {path}: it is a symlink")
    if not path.exists():
        place_private_file(path)


def _open(path: Path) -> sqlite3.Connection:
    _create(path)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        _enable_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("integrity check failed")
        _migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _enable_wal(connection: sqlite3.Connection) -> None:
    # Switching to WAL does not honour the busy timeout while another process does the same.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise SkyctlError(
            f"{path} was written by a newer skyctl (state version {version}, "
            f"this one knows {SCHEMA_VERSION})",
            hint="upgrade skyctl, or point SKYCTL_HOME at another directory",
        )
    if version == SCHEMA_VERSION:
        return
    if version > 0:
        raise SkyctlError(
            f"{path} was written by an older skyctl (state version {version}, "
            f"this one writes {SCHEMA_VERSION})",
            hint=f"end that fleet with the skyctl that started it, then: rm {path}",
        )
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _keep_aside(path: Path) -> Path | None:
    """Move a corrupt file (and its WAL) away; None when another process already did."""
    lock = create_private_file(path.with_suffix(".lock"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _open(path).close()
            return None
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            kept = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}")
            path.rename(kept)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return kept
    finally:
        os.close(lock)
