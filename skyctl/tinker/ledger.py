"""The API's promises, in SQLite: a request is committed and synced before its 200.

One thread owns the connection. Waiting changes are committed together, so that a burst of requests
costs a few syncs. Unlike a fleet's state, it never goes on in memory: a promise that is not on disk
is not made.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.store.opening import disk_failed
from skyctl.store.paths import place_private_file

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
VERSION = 2
_BATCH = 256
_DISK_S = 1.0
_SCHEMA = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, created REAL NOT NULL, seen REAL NOT NULL, tags TEXT NOT NULL,
    metadata TEXT, display_name TEXT, project TEXT, finished TEXT, clones INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, config TEXT NOT NULL, metadata TEXT,
    created REAL NOT NULL, used REAL NOT NULL,
    done_seq INTEGER NOT NULL DEFAULT -1,     -- the last request whose outcome is recorded
    snapshot_seq INTEGER NOT NULL DEFAULT -1, -- the last request that the snapshot contains
    snapshot TEXT,                            -- a directory; NULL: the fresh adapter
    broken INTEGER NOT NULL DEFAULT 0,        -- a forward_backward since the last step failed
    ended REAL                                -- its client is gone: only its checkpoints are left
);
CREATE TABLE requests (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB, created REAL NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'accepted',   -- accepted, done, failed, gone (its result is)
    result BLOB, type TEXT, category TEXT, done_at REAL, done_order INTEGER, extra TEXT,
    UNIQUE (owner, seq)
);
CREATE INDEX requests_done ON requests (owner, done_order);
CREATE INDEX requests_order ON requests (done_order);
CREATE INDEX requests_accepted ON requests (state) WHERE state = 'accepted';
CREATE TABLE checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    directory TEXT NOT NULL UNIQUE, config TEXT NOT NULL, optimizer INTEGER NOT NULL,
    created REAL NOT NULL, size INTEGER NOT NULL, public INTEGER NOT NULL DEFAULT 0,
    metadata TEXT, expires REAL, hidden INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX checkpoints_model ON checkpoints (model);
CREATE TABLE samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, path TEXT, inflight TEXT, created REAL NOT NULL,
    used REAL NOT NULL
);
"""
Change = Callable[[sqlite3.Connection], T]


class Ledger:
    """The database of one API process. Its rows are `sqlite3.Row`.

    Raises:
        SkyctlError: the file is of another skyctl, or cannot be used.
        StateUnwritable: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = _open(path)
        self._queue: queue.SimpleQueue[
            tuple[Change[Any], asyncio.Future[Any], asyncio.AbstractEventLoop] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="ledger", daemon=True)
        self._thread.start()

    async def run(self, change: Change[T]) -> T:
        """The result of `change`, once everything it wrote is committed and on disk.

        A change that raises is undone, and its error raised here.

        Raises:
            StateUnwritable: the disk does not accept it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put((change, future, loop))
        return await future

    async def insist(self, change: Change[T]) -> T:
        """As `run`, repeated until the disk accepts it: for what no client would ask for again."""
        while True:
            try:
                return await self.run(change)
            except StateUnwritable as error:
                _LOG.warning("%s", error)
            await asyncio.sleep(_DISK_S)

    async def row(self, sql: str, *parameters: Any) -> sqlite3.Row | None:
        """The first row of a query, None if there is none."""
        row: sqlite3.Row | None = await self.run(lambda c: c.execute(sql, parameters).fetchone())
        return row

    async def rows(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        """Every row of a query."""
        return await self.run(lambda c: c.execute(sql, parameters).fetchall())

    async def write(self, sql: str, *parameters: Any) -> int:
        """One statement, committed; the number of rows it changed."""
        return await self.run(lambda c: c.execute(sql, parameters).rowcount)

    def close(self) -> None:
        """Commit what waits, and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            batch = [item]
            ending = False
            while len(batch) < _BATCH and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    ending = True
                    break
                batch.append(following)
            for (_, future, loop), outcome in zip(
                batch, self._commit([change for change, _, _ in batch]), strict=True
            ):
                loop.call_soon_threadsafe(_complete, future, outcome)
            if ending:
                return

    def _commit(self, changes: list[Change[Any]]) -> list[tuple[Any, BaseException | None]]:
        outcomes: list[tuple[Any, BaseException | None]] = []
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for change in changes:
                connection.execute("SAVEPOINT one")
                try:
                    outcomes.append((change(connection), None))
                except BaseException as error:
                    if disk_failed(error):
                        raise
                    connection.execute("ROLLBACK TO one")
                    outcomes.append((None, error))
                connection.execute("RELEASE one")
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            unwritable = StateUnwritable(
                f"cannot write {self.path}: {error}", hint="make room on its disk"
            )
            if len(changes) == 1:
                return [(None, unwritable)]
            # one that only reads, or that there is room for, does not fail with another
            return [outcome for change in changes for outcome in self._commit([change])]
        return outcomes


def _complete(future: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    if future.cancelled():
        return
    value, error = outcome
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        place_private_file(path)
    try:
        connection = sqlite3.connect(
            path, timeout=10.0, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, VERSION):
            raise SkyctlError(
                f"{path} was written by another skyctl", hint="use that one, or move the file away"
            )
        if version == 0:
            connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
    except sqlite3.Error as error:
        raise SkyctlError(
            f"cannot open {path}: {error}", hint="move it away to begin without its runs"
        ) from error
    return connection
