"""A disk under state files that fails when it is told to, by SQLite's own means."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyctl.store import database, unrecorded

FAULTS = ("read-only", "full", "commit")
BIG = "x" * 100_000
"""More than what is left in any page: a full disk has no room for it."""


_WRITES = ("INSERT", "UPDATE", "DELETE")


def failing_disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    """One whose losses are forgotten with the test."""
    monkeypatch.setattr(unrecorded, "LOST", [])
    monkeypatch.setattr(database, "LOST", unrecorded.LOST)
    return FailingDisk()


class FailingDisk:
    """`connect` is for `FleetState(…, connect=…)`. `fail` and `mend` reach every open connection.

    read-only: no statement may write. full: the file must not grow (write something `BIG`).
    commit: every COMMIT, also of a single statement, finds the disk full.
    """

    def __init__(self) -> None:
        self.fault = ""
        self._connections: list[_Connection] = []

    def connect(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, factory=_Connection)
        connection.disk = self
        self._connections.append(connection)
        self._tell([connection])
        return connection

    def fail(self, fault: str) -> None:
        self.fault = fault
        self._tell(self._connections)

    def mend(self) -> None:
        self.fail("")

    def _tell(self, connections: Iterable[_Connection]) -> None:
        for connection in connections:
            try:
                connection.execute(f"PRAGMA query_only = {int(self.fault == 'read-only')}")
                pages = 1 if self.fault == "full" else 1_000_000  # 1: as many as there are
                connection.execute(f"PRAGMA max_page_count = {pages}")
            except sqlite3.ProgrammingError:
                pass  # closed


class _Connection(sqlite3.Connection):
    disk: FailingDisk

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:  # type: ignore[override]
        commits = sql == "COMMIT" or (sql.startswith(_WRITES) and not self.in_transaction)
        if commits and self.disk.fault == "commit":
            raise disk_full()
        return super().execute(sql, *parameters)  # type: ignore[arg-type]


def disk_full() -> sqlite3.OperationalError:
    """What SQLite raises."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


@contextmanager
def mounted(directory: Path, size: str = "320k") -> Iterator[Path]:
    """A small file system that nobody else uses; the test is skipped where it cannot be made."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Leave not one page of its disk; what to remove to have room again."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    return filler


def remount(directory: Path, option: str) -> None:
    """`ro`, also where files are open for writing: an error turns a file system so."""
    done = subprocess.run(
        ["mount", "-o", f"remount,{option}", str(directory)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot remount: {done.stderr.strip()}")
