"""The tables of a state file, and how an older file gets them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from skyctl.errors import SkyctlError

SCHEMA_VERSION = 2

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


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the tables of `connection`, which are those of `path`, to this version.

    Raises:
        SkyctlError: the file is of another version.
    """
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
        roll_back(connection)
        raise


def roll_back(connection: sqlite3.Connection) -> None:
    """Undo what is open, if anything is: SQLite undoes by itself what it has no room for, and
    a second error would hide the first."""
    if connection.in_transaction:
        connection.rollback()
