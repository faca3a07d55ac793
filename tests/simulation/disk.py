"""The state file of a simulated machine, and the checkpoints on its disk.

SQLite runs for real, in memory. What one process committed survives its death, what it had open
does not. While the disk is full or failing, writes raise what SQLite raises.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import zlib
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from skyctl.checkpoints.header import FileIdentity
from skyctl.store import opening
from skyctl.store.schema import create_tables
from tests.simulation.kernel import Kernel, Process, current
from tests.simulation.loop import PROCESS

TENSORS = ("lm_head.weight", "model.norm.weight", "model.layers.0.weight", "model.layers.1.weight")
SHAPE = [16]
_BYTES = 64
HUB = "hub"
"""The hub's cache, below the directory of all checkpoints."""


class Disk:
    """`full`: no write succeeds; `failing`: the probability that one does not."""

    def __init__(self, kernel: Kernel, dice: Random) -> None:
        self.full = False
        self.failing = 0.0
        self.writes = 0
        self.kernel = kernel
        self._dice = dice
        self.files: dict[str, sqlite3.Connection] = {}
        self.owner: Connection | None = None
        self.closed = False

    def open(self, path: Path) -> Connection:
        """What `opening.open_file` does."""
        process = current()
        found = self.files.get(str(path))
        # without room beside it for its WAL, a file may open or not
        if found is None or (self.full and self._dice.random() < 0.5):
            self.write_or_fail()
        if found is None:
            found = self.files[str(path)] = _new_file()
        return Connection(self, found, process)

    def read(self, path: Path) -> sqlite3.Connection:
        """What `opening.read_into_memory` does."""
        current()
        self.end_transaction_of_the_dead()
        found = self.files.get(str(path))
        return _new_file() if found is None else opening.in_memory(found)

    def write_or_fail(self) -> None:
        """Raise what a write raises while the disk is not well; die where that was decided."""
        self.writes += 1
        process: Process | None = PROCESS.get()
        if process is not None and "writes" in process.doomed:
            process.doomed["writes"] -= 1
            if process.doomed["writes"] < 0:
                self.kernel.die("is killed at a write")
        if self.full:
            raise _error("database or disk is full", sqlite3.SQLITE_FULL)
        if self.failing and self._dice.random() < self.failing:
            raise _error("disk I/O error", sqlite3.SQLITE_IOERR)

    def end_transaction_of_the_dead(self, connection: Connection | None = None) -> None:
        """Raises what SQLite does when it is somebody else's who lives."""
        owner = self.owner
        if owner is None or owner is connection:
            return
        if owner._process is None or not owner._process.dead:
            raise sqlite3.OperationalError("database is locked")
        owner._undo()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for file in self.files.values():
                _empty(file)
                _EMPTY.append(file)


_EMPTY: list[sqlite3.Connection] = []
"""Used again by later schedules: what a connection has prepared stays so."""


def _new_file() -> sqlite3.Connection:
    """One of this version, without a row."""
    if _EMPTY:
        return _EMPTY.pop()
    file = opening.in_memory()
    create_tables(file, Path("state.db"))
    return file


def _empty(file: sqlite3.Connection) -> None:
    if file.in_transaction:
        file.rollback()
    for (table,) in file.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
        file.execute(f"DELETE FROM {table}")


class Connection:
    """One process's connection. Stands in for `sqlite3.Connection`."""

    def __init__(self, disk: Disk, file: sqlite3.Connection, process: Process | None) -> None:
        self._disk = disk
        self._file = file
        self._process = process
        self._open = True

    @property
    def in_transaction(self) -> bool:
        return self._disk.owner is self

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        disk = self._disk
        self._require_open()
        disk.end_transaction_of_the_dead(self)
        verb = sql[:6].upper()
        if verb == "SELECT" or verb == "PRAGMA":
            return self._file.execute(sql, parameters)
        if verb == "BEGIN ":
            disk.owner = self
            return self._file.execute("BEGIN")
        try:
            disk.write_or_fail()
        except sqlite3.OperationalError:
            self._undo()  # as SQLite does when the disk is full
            raise
        cursor = self._file.execute(sql, parameters)
        if verb == "COMMIT":
            disk.owner = None
        return cursor

    def backup(self, target: sqlite3.Connection) -> None:
        self._require_open()
        self._disk.end_transaction_of_the_dead(self)
        self._file.backup(target)

    def _require_open(self) -> None:
        current()
        if self._disk.closed or not self._open:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")

    def rollback(self) -> None:
        current()
        self._undo()

    def _undo(self) -> None:
        if self._disk.owner is self:
            self._disk.owner = None
            if not self._disk.closed:
                self._file.execute("ROLLBACK")

    def close(self) -> None:
        self._open = False
        self._undo()


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


class Checkpoints:
    """Directories of tiny checkpoints. A version's number says what all of its bytes are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.of_content: dict[tuple[int, ...], int] = {}
        self.digests: dict[int, str] = {}
        self.bytes_of: dict[int, bytes] = {}  # by value
        self._alike: dict[int, int] = {}  # damaged value → the one that rows cannot tell it from
        self.at: dict[str, int] = {}  # what lies at a path now
        self.staged = 0  # directories of weights from a trainer's memory
        self._moments = 0
        self._numbers: dict[str, int] = {}  # of files
        self._copies: dict[tuple[int, int], int] = {}  # inode, time of its last change → number
        self._files: dict[int, tuple[int, int]] = {}  # inode → number of the file, its last change

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def values(self, number: int) -> dict[str, int]:
        """Tensor → value of one version, and remember it."""
        found = {}
        for place, name in enumerate(TENSORS):
            data = bytes_of(number, place)
            found[name] = zlib.crc32(data)
            self.bytes_of[found[name]] = data
        self.of_content[tuple(found.values())] = number
        content = sorted((name, "F32", tuple(SHAPE), crc) for name, crc in found.items())
        self.digests[number] = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
        return found

    def move_link(self, name: str, number: int) -> str:
        """Write a version into a directory of its own, and have a link lead there now; the link."""
        directory, link = self.write(f"step-{number}", number), self.directory / name
        link.unlink(missing_ok=True)
        link.symlink_to(directory)
        return str(link)

    def commit(self, name: str, number: int) -> str:
        """Write a version as a new commit of a repository in the hub's cache; its id."""
        repository = Path(HUB, f"models--sim--{name}")
        self.write(str(repository / "snapshots" / f"{number:040x}"), number)
        main = self.directory / repository / "refs" / "main"
        main.parent.mkdir(exist_ok=True)
        main.write_text(f"{number:040x}")
        return f"sim/{name}"

    def has(self, label: str) -> bool:
        """Whether what skyctl gave this label is still where a link or a branch led to."""
        return any(
            label.partition("@")[2] == self.digests[number][:8]
            for path, number in self.at.items()
            if path.endswith((f"step-{number}", f"{number:040x}"))
        )

    def alike(self, damaged: int, value: int) -> None:
        """Comparing rows does not tell these values apart."""
        self._alike[damaged] = self._alike.get(value, value)
        self.bytes_of[damaged] = self.bytes_of.get(value, b"?" * _BYTES)

    def identity(self, status: os.stat_result) -> FileIdentity:
        """What the kernel would answer here: real inodes and changes differ from run to run."""
        if status.st_ino not in self._files:  # a copy that the product has made
            copy = self._copies.setdefault((status.st_ino, status.st_mtime_ns), len(self._copies))
            return FileIdentity(2, copy, status.st_size, 0, 0)
        number, changed = self._files[status.st_ino]
        return FileIdentity(1, number, status.st_size, status.st_mtime_ns, changed)

    def number(self, content: tuple[int, ...] | None) -> int | None:
        """The version that a server with these weights holds, as far as rows can tell; None if
        they are no version's."""
        if content is None:
            return None
        return self.of_content.get(tuple(self._alike.get(value, value) for value in content))

    def next_number(self) -> int:
        """Of a version that nobody has written yet."""
        return max(self.digests) + 1

    def write(self, name: str, number: int, *, same_time: bool = False) -> str:
        """Overwrite a directory with a version; its path. `same_time`: by a program that sets the
        time of the file to what it was."""
        self.values(number)
        path = self.directory / name
        path.mkdir(parents=True, exist_ok=True)
        file = path / "model.safetensors"
        data = b"".join(bytes_of(number, place) for place in range(len(TENSORS)))
        if not (path / "config.json").exists():
            (path / "config.json").write_text('{"architectures": ["Sim"]}')
        moment = written = self._next_moment()
        if same_time and str(path) in self.at:  # not by a schedule before
            written = file.stat().st_mtime_ns
        file.write_bytes(_HEADER + data)
        os.utime(file, ns=(written, written))
        self._changed(file, moment)
        self.at[str(path)] = number
        return str(path)

    def read(self, path: str) -> dict[str, int]:
        """Tensor → value of what a directory holds now. Raises OSError, ValueError."""
        data = Path(path, "model.safetensors").read_bytes()
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        places = {
            name: row["data_offsets"]
            for name, row in json.loads(data[8:begin]).items()
            if name in TENSORS
        }
        return {name: zlib.crc32(data[begin + a : begin + b]) for name, (a, b) in places.items()}

    def touched(self, file: Path) -> None:
        """Somebody has written into a file."""
        moment = self._next_moment()
        os.utime(file, ns=(moment, moment))
        self._changed(file, moment)

    def _next_moment(self) -> int:
        """Nanoseconds of the epoch, later than any before."""
        self._moments += 1
        return 1_700_000_000_000_000_000 + self._moments * 1_000_000_000

    def _changed(self, file: Path, moment: int) -> None:
        """By its path: the inode of a file that was removed may be another's."""
        number = self._numbers.setdefault(str(file), len(self._numbers))
        self._files[file.stat().st_ino] = number, moment


def bytes_of(number: int, place: int) -> bytes:
    return blake2b(f"{number} {place}".encode(), digest_size=_BYTES).digest()


def _header() -> bytes:
    header = {
        name: {
            "dtype": "F32",
            "shape": SHAPE,
            "data_offsets": [place * _BYTES, (place + 1) * _BYTES],
        }
        for place, name in enumerate(TENSORS)
    }
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


_HEADER = _header()
