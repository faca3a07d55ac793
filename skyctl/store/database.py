"""The SQLite file behind a fleet's state, and the copy in memory that stands in for it.

If the file cannot be written (the disk is full, read-only, or fails), its connection goes on with a
copy in memory. Later writes are kept, and written to the file once there is room: now and then,
before a `durable` transaction, and at the end. The copy is refreshed now and then, and when the
fleet's turn is taken: others may have acted meanwhile. Kept statements are repeated in their order,
in one transaction: where another process wrote the same field meanwhile, the last writer wins;
additions to a history follow those of others. They are dropped only if another job has begun
meanwhile: it found the fleet as it was, and its records are the later ones.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.store import opening
from skyctl.store.opening import Connect, disk_failed
from skyctl.store.owned import after_fork_in_child
from skyctl.store.paths import advice, place_private_file, private_directory
from skyctl.store.schema import create_tables, roll_back
from skyctl.store.unrecorded import LOST, Unrecorded

RETRY_S = 2.0
"""How often a write checks whether the file can be written again."""

_ROWS_PER_STATEMENT = 1000

RESERVE_BYTES = 4 * 1024 * 1024
"""Room for the records of a push under way when the disk fills up."""

_NOT_UNDERSTOOD = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What code raises that interprets rows which skyctl did not write."""

P = ParamSpec("P")
R = TypeVar("R")
Statement = tuple[str, tuple[Any, ...]]


def understood(read: Callable[P, R]) -> Callable[P, R]:
    """Wraps a method that interprets rows, of a database or of a class with a `_database`."""

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except _NOT_UNDERSTOOD as error:
            own: Any = args[0]
            database = own if isinstance(own, Database) else own._database
            raise damaged(database.path, error) from error

    return reading


class _Readable:
    """Wraps statements: SQLite's errors become ours. A class: each statement enters it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        # UnicodeDecodeError: SQLite's own message quotes the damaged text
        if isinstance(error, sqlite3.OperationalError | UnicodeDecodeError):
            raise SkyctlError(f"cannot use {self._path}: {error}") from error
        if isinstance(error, sqlite3.DatabaseError | OverflowError):
            raise damaged(self._path, error) from error


@dataclass(frozen=True)
class Retention:
    """The latest `pushes` and `events` are kept, unless they are older than `days`: the fleet
    file's `history:`.
    """

    pushes: int = 500
    events: int = 10_000
    days: float = 90.0


class Database:
    """One connection to a fleet's state file, for one thread. Every write is a transaction.

    `warn` receives one line when a corrupt file was kept aside and a new one `recreated`, and when
    the file cannot be written. The `owner` (the process that holds the lock of the fleet's
    supervisor) checks the whole file for corruption. A file that cannot be read is an error, or
    with `or_memory` an empty state that is `unread`.

    Raises:
        SkyctlError: the file was written by another skyctl, or cannot be opened.
        StateUnwritable: it cannot even be read, and not `or_memory`.
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None] = lambda line: None,
        owner: bool = False,
        or_memory: bool = False,
        connect: Connect = opening.connect,
    ) -> None:
        self.path = path
        self._readable = _Readable(path)
        self.recreated = False
        self.retention = Retention()
        self.unread = False
        self._warn = warn
        self._connect = connect
        self._owner = owner
        self._file: sqlite3.Connection | None = None
        self._memory: sqlite3.Connection | None = None  # stands in for the file
        self._failure = self._hint = ""  # why the memory stands in, and what to do about it
        self._kept: list[Statement] = []  # committed in memory only
        self._transaction: list[Statement] | None = None  # the open transaction
        self._durable = False  # whether it must be in the file
        self._once_committed: list[Callable[[], None]] = []
        self._tried = 0.0
        self._reserve = path.with_suffix(".reserve")
        _databases.add(self)
        try:
            private_directory(path.parent)
            self._file = self._open_or_recreate()
        except (sqlite3.Error, OSError, SkyctlError) as error:
            if not disk_failed(error):
                if isinstance(error, SkyctlError):
                    raise
                raise SkyctlError(f"cannot open {path}: {error}") from error
            self._begin_in_memory(error, or_memory)

    @property
    def unrecorded(self) -> Unrecorded | None:
        """What the file lacks, None if it is complete."""
        if self._memory is None or not self._kept:
            return None
        return Unrecorded(self.path, len(self._kept), self._failure, self._hint)

    def close(self) -> None:
        """Complete the file, or record the failure in `unrecorded.LOST`."""
        if self._kept and not self.complete() and (lost := self.unrecorded):
            LOST.append(lost)
            self._kept.clear()
        for connection in (self._file, self._memory):
            if connection is not None:
                connection.close()

    def rows(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        """Every row of a query."""
        if self._may_try_again():
            self.refresh()
        with self._readable:
            return self._run(sql, parameters).fetchall()

    def row(self, sql: str, *parameters: Any) -> sqlite3.Row | None:
        """The first row of a query, None when there is none."""
        rows = self.rows(sql, *parameters)
        return rows[0] if rows else None

    def write(self, sql: str, *parameters: Any, durable: bool = False) -> sqlite3.Cursor:
        """One statement, committed when it returns (unless in a `transaction`).

        `durable` as in `transaction`.

        Raises:
            SkyctlError: the file cannot be used (locked for too long, damaged).
            StateUnwritable: it cannot be written, although it must be.
        """
        parameters = tuple(map(_writable, parameters))
        if durable:
            self._need_file()
        elif self._may_try_again():
            self.complete()
        before, self._durable = self._durable, self._durable or durable
        try:
            with self._readable:
                cursor = self._run(sql, parameters)
        finally:
            if self._transaction is None:
                self._durable = before
        if self._transaction is not None:
            self._transaction.append((sql, parameters))
        elif self._memory is not None:
            self._kept.append((sql, parameters))
        return cursor

    def write_rows(
        self, sql: str, rows: Sequence[Sequence[Any]], after: str = "", *, durable: bool = False
    ) -> None:
        """Run `sql` VALUES these rows `after`, in as few statements as SQLite's limits allow."""
        for first in range(0, len(rows), _ROWS_PER_STATEMENT):
            some = rows[first : first + _ROWS_PER_STATEMENT]
            marks = ", ".join([f"({', '.join('?' * len(some[0]))})"] * len(some))
            values = (value for row in some for value in row)
            self.write(f"{sql} VALUES {marks} {after}".rstrip(), *values, durable=durable)

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Everything inside is committed together or not at all; other writers wait.

        A nested one is part of the outer one. What a `durable` one writes survives the death of
        this process once the outermost block has ended.

        Raises:
            StateUnwritable: `durable`, and the file cannot be written; nothing is.
        """
        if self._transaction is not None:
            if durable:
                self._need_file()
            self._durable = self._durable or durable
            yield
            return
        if durable:
            self._need_file()
        elif self._may_try_again():
            self.complete()
        self._durable = durable
        try:
            with self._readable:
                self._run("BEGIN IMMEDIATE")
                self._transaction = []
            yield
            with self._readable:
                self._run("COMMIT")
            if self._memory is not None:
                self._kept += self._transaction
        except BaseException:
            self._once_committed.clear()
            for connection in (self._file, self._memory):
                if connection is not None:
                    roll_back(connection)
            raise
        finally:
            self._transaction = None
            self._durable = False
        committed, self._once_committed = self._once_committed, []
        for act in committed:
            act()

    def once_committed(self, act: Callable[[], None]) -> None:
        """Do this once the open transaction is committed, or now if there is none; not at all if it
        is given up.
        """
        if self._transaction is None:
            act()
        else:
            self._once_committed.append(act)

    def durable(self) -> AbstractContextManager[None]:
        """A `durable` transaction: for what must be on record before it is acted upon. Raises
        StateUnwritable.
        """
        return self.transaction(durable=True)

    def reserve(self) -> None:
        """Reserve disk space for the records of something long that is about to begin.

        Raises:
            StateUnwritable: there is not enough.
        """
        if not self._reserve.exists():
            place_private_file(self._reserve, bytes(RESERVE_BYTES))

    def complete(self) -> bool:
        """Write to the file what only the memory holds; False while it cannot be written."""
        if self._memory is None:
            return True
        if self._transaction is not None:
            return False
        self._tried = time.monotonic()
        if self._file is not None:  # a file opened on a read-only disk stays read-only
            self._file.close()
            self._file = None
        try:
            private_directory(self.path.parent)
            file = opening.open_file(self.path, self._connect, owner=self._owner)
        except (sqlite3.Error, OSError, SkyctlError) as error:
            self._fails(error)
            return False
        try:
            file.execute("BEGIN IMMEDIATE")
            self._repeat_kept(file)
            file.execute("COMMIT")
        except sqlite3.Error as error:
            self._fails(error)
            roll_back(file)
            file.close()
            return False
        self._memory.close()
        self._file, self._memory = file, None
        self._kept.clear()
        self.unread = False
        self._warn(f"{self.path} can be written again, and is complete")
        return True

    def refresh(self) -> None:
        """Read what others have written to the file since it was copied."""
        if self._memory is None or self._transaction is not None or self.complete():
            return
        with suppress(sqlite3.Error, OSError):
            again = opening.read_into_memory(self.path)
            self._repeat_kept(again)
            self._memory.close()
            self._memory, self.unread = again, False

    def require_read(self) -> None:
        """Raise StateUnwritable while the state is empty because the file cannot be read."""
        if self.unread and not self.complete():
            raise StateUnwritable(
                f"cannot read {self.path}: {self._failure}; what is quarantined is not known",
                hint=self._hint,
            )

    @contextmanager
    def understanding(self) -> Iterator[None]:
        """Wraps code that interprets rows: a row that skyctl did not write raises SkyctlError."""
        try:
            yield
        except _NOT_UNDERSTOOD as error:
            raise damaged(self.path, error) from error

    def _run(self, sql: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Run one statement in the file, or in memory if the file fails."""
        if self._memory is None:
            assert self._file is not None  # opened, or there is a memory
            try:
                return self._file.execute(sql, parameters)
            except sqlite3.OperationalError as error:
                if not disk_failed(error):
                    raise
                # what has begun can be completed in the room of the reserve, if it is still there
                with suppress(OSError, sqlite3.OperationalError):
                    self._reserve.unlink()
                    self._repeat_transaction(self._file)
                    return self._file.execute(sql, parameters)
                self._memory = self._stand_in(error)
        return self._memory.execute(sql, parameters)

    def _stand_in(self, error: sqlite3.Error) -> sqlite3.Connection:
        """A copy of the file in memory, as it is within the open transaction."""
        assert self._file is not None  # it is what failed
        roll_back(self._file)
        self._fails(error)
        if self._durable:
            raise self._unwritable() from error
        memory = opening.in_memory(self._file)
        self._repeat_transaction(memory)
        self._warn(f"cannot write {self.path}: {self._failure}; going on in memory")
        return memory

    def _repeat_transaction(self, connection: sqlite3.Connection) -> None:
        """Repeat the statements of the open transaction: SQLite may have undone it."""
        roll_back(connection)
        if self._transaction is not None:
            connection.execute("BEGIN IMMEDIATE")
            for statement in self._transaction:
                connection.execute(*statement)

    def _begin_in_memory(self, error: Exception, or_memory: bool) -> None:
        """The file cannot be opened for writing; read what it holds, if possible."""
        self._fails(error)
        try:
            self._memory = opening.read_into_memory(self.path)
        except (sqlite3.Error, OSError) as unreadable:
            if not or_memory:
                raise self._unwritable() from unreadable
            self.unread = True
            self._memory = opening.in_memory()
            create_tables(self._memory, self.path)
        self._warn(f"cannot write {self.path}: {self._failure}; going on in memory")

    def _open_or_recreate(self) -> sqlite3.Connection:
        try:
            return opening.open_file(self.path, self._connect, owner=self._owner)
        except sqlite3.OperationalError:
            raise
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            kept = opening.keep_aside(self.path, self._connect)
            if kept is not None:
                self.recreated = True
                self._warn(
                    f"{self.path} was corrupt ({error}); kept as {kept.name} and begun again"
                )
            return opening.open_file(self.path, self._connect, owner=self._owner)

    def _need_file(self) -> None:
        if not self.complete():
            raise self._unwritable()

    def _may_try_again(self) -> bool:
        """Whether a memory stands in for the file, and the file was not tried just now."""
        return self._memory is not None and time.monotonic() - self._tried > RETRY_S

    def _repeat_kept(self, connection: sqlite3.Connection) -> None:
        """Repeat the kept statements, unless another job has begun since the file was copied."""
        assert self._memory is not None  # it holds what is kept
        if _latest_job(connection) > _latest_job(self._memory):
            if self._kept:
                reason = "another job began meanwhile"
                LOST.append(Unrecorded(self.path, len(self._kept), reason, "see: skyctl status"))
            self._kept.clear()
        for sql, parameters in self._kept:
            connection.execute(sql, parameters)

    def _fails(self, error: Exception) -> None:
        self._failure = _reason(error)
        hint = error.hint if isinstance(error, SkyctlError) else ""
        self._hint = hint or advice(self.path, self._failure)
        self._tried = time.monotonic()

    def _unwritable(self) -> StateUnwritable:
        return StateUnwritable(f"cannot write {self.path}: {self._failure}", hint=self._hint)


_databases: WeakSet[Database] = WeakSet()


def _abandon_inherited() -> None:
    """Never close a connection of the process that forked this one: SQLite would undo an open
    transaction of that process in memory that both share (sqlite.org/howtocorrupt.html, 2.6).
    """
    import ctypes

    for database in list(_databases):
        for connection in (database._file, database._memory):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
        database._file = database._memory = None
    _databases.clear()


after_fork_in_child(_abandon_inherited)


def _writable(value: Any) -> Any:
    """Text as SQLite takes it: what is not UTF-8 (of a path, of a server's message) is replaced."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode(errors="replace").decode()


def _latest_job(connection: sqlite3.Connection) -> int:
    number: int | None = connection.execute("SELECT max(number) FROM jobs").fetchone()[0]
    return number or 0


def damaged(path: Path, error: Exception) -> SkyctlError:
    """The error of a state file that opens but is inconsistent."""
    return SkyctlError(
        f"{path} is damaged: {' '.join(str(error).split())[:200]}",
        hint=f"mv {path} {path}.damaged; then: skyctl recover",
    )


def _reason(error: Exception) -> str:
    """The reason without the path, which the message already has."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return error.message.rpartition(": ")[2] if isinstance(error, SkyctlError) else str(error)
