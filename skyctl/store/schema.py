"""The tables of a state file, version by version, and how an older file is upgraded."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.store.identity import ProcessIdentity
from skyctl.store.owned import FileLock
from skyctl.store.paths import create_private_file, flocked

VERSIONS: dict[int, str] = {
    2: """
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
""",
    # one row per server instead of JSON in `meta` and `jobs`: written without reading the others;
    # the stage of a job, and of its servers, is that of its last event
    3: """
ALTER TABLE servers ADD COLUMN weights_awake INTEGER NOT NULL DEFAULT 0;
INSERT OR IGNORE INTO servers (name, paused, sleep_level)
    SELECT value, 0, 0 FROM json_each((SELECT value FROM meta WHERE key = 'weights_awake'));
UPDATE servers SET weights_awake = 1 WHERE name IN (
    SELECT value FROM json_each((SELECT value FROM meta WHERE key = 'weights_awake')));
CREATE TABLE in_doubt (
    server TEXT PRIMARY KEY, job TEXT NOT NULL, stage TEXT NOT NULL,
    half_updated INTEGER NOT NULL, thaw INTEGER NOT NULL, woken INTEGER NOT NULL,
    digest TEXT NOT NULL, version TEXT NOT NULL);
INSERT INTO in_doubt
    SELECT json_extract(value, '$.server'), json_extract(value, '$.job'),
        json_extract(value, '$.stage'), json_extract(value, '$.half_updated'),
        json_extract(value, '$.thaw'), coalesce(json_extract(value, '$.woken'), 0), '', ''
    FROM json_each((SELECT value FROM meta WHERE key = 'in_doubt'));
DELETE FROM meta WHERE key IN ('weights_awake', 'in_doubt');
ALTER TABLE job_events ADD COLUMN server TEXT;
UPDATE job_events SET server = json_extract(data, '$.server') WHERE kind = 'server';
CREATE INDEX job_events_of_servers ON job_events (job, server, sequence);
ALTER TABLE jobs RENAME TO jobs_2;
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, state TEXT NOT NULL,
    done_bytes INTEGER NOT NULL, total_bytes INTEGER NOT NULL, request TEXT NOT NULL,
    created_at REAL NOT NULL, finished_at REAL, error TEXT, result TEXT, owner TEXT NOT NULL);
INSERT INTO jobs SELECT number, kind, state, done_bytes, total_bytes, request, created_at,
    finished_at, error, result, owner FROM jobs_2;
DROP TABLE jobs_2;
DROP TABLE locks;
CREATE TABLE expected_digests (
    content TEXT NOT NULL, engine TEXT NOT NULL, arrangement TEXT NOT NULL, origin TEXT NOT NULL,
    digest TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (content, engine, arrangement, origin));
CREATE TABLE broken_reloads (
    layout TEXT NOT NULL, engine TEXT NOT NULL, model TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (layout, engine));
CREATE TABLE launches (
    server TEXT PRIMARY KEY, content TEXT NOT NULL);
""",
    # LoRA adapters (`store/adapters.py`): names, the files of their versions, what servers serve
    4: """
CREATE TABLE adapters (
    name TEXT PRIMARY KEY, last INTEGER NOT NULL, version INTEGER, target INTEGER) WITHOUT ROWID;
CREATE TABLE adapter_versions (
    name TEXT NOT NULL, version INTEGER NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
    source TEXT NOT NULL, rank INTEGER NOT NULL, bytes INTEGER NOT NULL, at REAL NOT NULL,
    until REAL, PRIMARY KEY (name, version)) WITHOUT ROWID;
CREATE TABLE server_adapters (
    server TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (server, name)) WITHOUT ROWID;
""",
    # servers that skyctl did not start are known by their URL (`store/server_names.py`)
    5: """
ALTER TABLE servers ADD COLUMN url TEXT NOT NULL DEFAULT '';
ALTER TABLE servers ADD COLUMN located INTEGER NOT NULL DEFAULT 0;
""",
}
"""The statements that upgrade a file to each version from the one before."""

SCHEMA_VERSION = max(VERSIONS)


def migrate(connection: sqlite3.Connection, path: Path, *, owner: bool = False) -> None:
    """Bring the file at `path` to this version; an older one is copied aside first.

    `owner`: this process holds the lock of the fleet's supervisor.

    Raises:
        SkyctlError: the file is of a newer version.
        StateUnwritable: it is older, and a process of that skyctl uses it.
    """
    version = version_of(connection, path)
    if version == SCHEMA_VERSION:
        return
    lock = path.with_suffix(".lock")
    with FileLock(lock, lambda: create_private_file(lock)) as migrating:
        migrating.take(wait=True)  # two at once: the second finds it done
        if 0 < version == version_of(connection, path):
            _refuse_while_used(connection, path, owner)
            _copy_aside(connection, path.with_name(f"{path.name}.version-{version}"))
        upgrade(connection, path)


def upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Run the statements that the database (`path` or a copy of it) lacks, all or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = version_of(connection, path)
        for missing in sorted(one for one in VERSIONS if one > version):
            for statement in VERSIONS[missing].split(";\n"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the file, 0 for a new one.

    Raises:
        SkyctlError: a version that this skyctl cannot use.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise SkyctlError(
            f"{path} was written by a newer skyctl (state version {version}, "
            f"this one knows {SCHEMA_VERSION})",
            hint="upgrade skyctl, or point SKYCTL_HOME at another directory",
        )
    if 0 < version < min(VERSIONS):
        raise SkyctlError(
            f"{path} was written by a much older skyctl (state version {version}, "
            f"this one reads {min(VERSIONS)} and later)",
            hint=f"end that fleet with the skyctl that started it, then: rm {path}",
        )
    return version


def roll_back(connection: sqlite3.Connection) -> None:
    """Undo the open transaction, if any: SQLite rolls back by itself when it has no room, and a
    second error would hide the first.
    """
    if connection.in_transaction:
        connection.rollback()


def _refuse_while_used(connection: sqlite3.Connection, path: Path, owner: bool) -> None:
    """A running program must not have its tables changed: until it ends, others read a copy."""
    if not owner and flocked(path.with_name("supervisor.lock")):
        raise StateUnwritable(
            f"{path}: the supervisor of this fleet is of an older skyctl",
            hint="put one of this version in its place, the servers go on: skyctl recover",
        )
    for number, owner_json in connection.execute(
        "SELECT number, owner FROM jobs WHERE state = 'running'"
    ):
        if ProcessIdentity(**json.loads(owner_json)).alive():
            raise StateUnwritable(
                f"{path}: an older skyctl runs push-{number}", hint="wait for it to end"
            )


def _copy_aside(connection: sqlite3.Connection, copy: Path) -> None:
    """Copy the file aside, whole or not at all; an existing copy is from an earlier attempt."""
    temporary = copy.with_name(f"{copy.name}.tmp")
    os.close(create_private_file(temporary, os.O_TRUNC))
    with closing(sqlite3.connect(temporary)) as target:
        connection.backup(target)
    temporary.replace(copy)
