"""The tables of a state file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from skyctl.errors import SkyctlError

SCHEMA_VERSION = 2
"""Increment it with every change of the tables: a file of another version is refused."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE processes (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, phase TEXT NOT NULL, token TEXT NOT NULL,
    pid INTEGER, create_time REAL, boot_id TEXT, spec_hash TEXT NOT NULL,
    host TEXT NOT NULL, port INTEGER NOT NULL, gpus TEXT NOT NULL, started_at REAL NOT NULL,
    descendants TEXT NOT NULL DEFAULT '[]', settings TEXT NOT NULL DEFAULT '{}');
-- servers that skyctl did not start are known by their URL (server_names.py)
CREATE TABLE servers (
    name TEXT PRIMARY KEY, paused INTEGER NOT NULL, sleep_level INTEGER NOT NULL,
    weight_version TEXT, checkpoint TEXT, checkpoint_digest TEXT, weights_digest TEXT,
    quarantine TEXT, weights_awake INTEGER NOT NULL DEFAULT 0, url TEXT NOT NULL DEFAULT '',
    located INTEGER NOT NULL DEFAULT 0);
CREATE TABLE in_doubt (
    server TEXT PRIMARY KEY, job TEXT NOT NULL, stage TEXT NOT NULL,
    half_updated INTEGER NOT NULL, thaw INTEGER NOT NULL, woken INTEGER NOT NULL,
    digest TEXT NOT NULL, version TEXT NOT NULL);
CREATE TABLE launches (
    server TEXT PRIMARY KEY, content TEXT NOT NULL, other_settings INTEGER NOT NULL);
-- the stage of a job, and of its servers, is that of its last event
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, state TEXT NOT NULL,
    done_bytes INTEGER NOT NULL, total_bytes INTEGER NOT NULL, request TEXT NOT NULL,
    created_at REAL NOT NULL, finished_at REAL, error TEXT, result TEXT, owner TEXT NOT NULL);
CREATE TABLE job_events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL, at REAL NOT NULL,
    kind TEXT NOT NULL, data TEXT NOT NULL, server TEXT);
CREATE INDEX job_events_of ON job_events (job, sequence);
CREATE INDEX job_events_of_servers ON job_events (job, server, sequence);
CREATE TABLE pushes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL, at REAL NOT NULL,
    ok INTEGER NOT NULL, version TEXT, checkpoint TEXT NOT NULL, checkpoint_digest TEXT,
    result TEXT NOT NULL);
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, subject TEXT NOT NULL,
    message TEXT NOT NULL);
CREATE TABLE expected_digests (
    content TEXT NOT NULL, engine TEXT NOT NULL, arrangement TEXT NOT NULL, origin TEXT NOT NULL,
    digest TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (content, engine, arrangement, origin));
CREATE TABLE broken_reloads (
    layout TEXT NOT NULL, engine TEXT NOT NULL, model TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (layout, engine));
-- LoRA adapters (adapters.py): names, the files of their versions, what servers serve
CREATE TABLE adapters (
    name TEXT PRIMARY KEY, last INTEGER NOT NULL, version INTEGER, target INTEGER) WITHOUT ROWID;
CREATE TABLE adapter_versions (
    name TEXT NOT NULL, version INTEGER NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
    source TEXT NOT NULL, rank INTEGER NOT NULL, bytes INTEGER NOT NULL, at REAL NOT NULL,
    until REAL, PRIMARY KEY (name, version)) WITHOUT ROWID;
CREATE TABLE server_adapters (
    server TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (server, name)) WITHOUT ROWID;
"""


def create_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new database (`path` or a copy of it), all or none.

    Raises:
        SkyctlError: the file is of another version.
    """
    if _has_tables(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _has_tables(connection, path):  # another process may have been faster
            for statement in TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version not in (0, SCHEMA_VERSION):
        raise SkyctlError(
            f"{path} was written by another skyctl (state version {version}, not {SCHEMA_VERSION})",
            hint=f"end that fleet with the skyctl that wrote it: skyctl down; or remove what it "
            f"recorded: rm -r {path.parent}",
        )
    return version == SCHEMA_VERSION


def roll_back(connection: sqlite3.Connection) -> None:
    """Undo the open transaction, if any: SQLite rolls back by itself when it has no room, and a
    second error would hide the first.
    """
    if connection.in_transaction:
        connection.rollback()
