"""What a fleet remembers: its processes, each server's intended state, weights, jobs and locks."""

from __future__ import annotations

import json
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from skyctl.errors import StateUnwritable
from skyctl.states import FleetEvent
from skyctl.store.database import Database, understood
from skyctl.store.expected_digests import ExpectedDigests
from skyctl.store.fleet_weights import Canary, FleetWeights
from skyctl.store.identity import ProcessIdentity
from skyctl.store.journal import Journal, prune, prune_events
from skyctl.store.locks import Locks, News
from skyctl.store.opening import Connect, connect
from skyctl.store.processes import ProcessRow, live_processes

_PRUNE_EVERY_EVENTS = 500

_BY_SERVER = {
    "servers": "name",
    "in_doubt": "server",
    "server_adapters": "server",
    "launches": "server",
}
"""Tables that say something of a server, and the column that has its name."""
_RENAMING = ">"
"""Marks new names until all are given: no name begins with it."""

_HOLDER_KEY = "holder"
_CANARY_KEY = "canary"
_DRAINED_KEY = "drained"
BASE_KEY = "base"
"""Where the fleet's base weights are on record (`store/base_weights.py`)."""


@dataclass(frozen=True)
class ServerRow:
    """The intended state of one server, whichever process serves it now."""

    name: str
    """Its name in the fleet."""
    paused: bool = False
    """A server that slept while paused is paused again on waking."""
    sleep_level: int = 0
    """0 awake; 1 asleep with its weights (or once a push restored them), 2 while these are gone."""
    weight_version: str | None = None
    """What it was given; None before its first push."""
    checkpoint: str | None = None
    """What was pushed; None if no file has it."""
    checkpoint_digest: str | None = None
    """Of the identity of its files."""
    weights_digest: str | None = None
    """What its weights must have; None if that was not computed."""
    quarantine: str | None = None
    """Why it is kept out of the router; None if it is not."""
    weights_awake: bool = False
    """It sleeps, but its weights were woken, so that they can take a push; to vLLM, which does not
    report this, a server is asleep until all of it is awake.
    """
    url: str = ""
    """Where it is (`server_names.normalized`); "" for one that skyctl starts, which is known by its
    process.
    """
    located: bool = False
    """Whether it was among those that were located when names were last recorded."""

    @property
    def intended(self) -> Literal["running", "paused", "asleep"]:
        """The intended state in one word."""
        if self.sleep_level:
            return "asleep"
        return "paused" if self.paused else "running"


@dataclass(frozen=True)
class Event:
    """One line of the fleet's history (`at` in seconds since the epoch); later ones have larger
    numbers.
    """

    at: float
    subject: str
    message: str
    sequence: int


class FleetState(Database):
    """A fleet's state file, for one thread of one process; close it, or use it in a `with`.

    Other modules of this package keep tables of their own in it (`adapters.py`, `in_doubt.py`).
    """

    def __init__(
        self,
        path: Path,
        *,
        warn: Callable[[str], None] = lambda line: None,
        owner: bool = False,
        or_memory: bool = False,
        connect: Connect = connect,
    ) -> None:
        super().__init__(path, warn=warn, owner=owner, or_memory=or_memory, connect=connect)
        news = News()
        self.journal = Journal(self, news)
        self.locks = Locks(path.parent, news, self.refresh)
        self.expected = ExpectedDigests(self)
        self.on_event: Callable[[FleetEvent, Event, Mapping[str, Any]], None] = _ignore
        self._holder = ""
        if self.recreated and (running := live_processes(path.parent)):
            for row in running:
                self.save_process(row)
            warn(f"found alive: {', '.join(sorted({row.name for row in running}))}")

    def __enter__(self) -> FleetState:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- processes ---------------------------------------------------------------------------

    @understood
    def processes(self) -> list[ProcessRow]:
        """Every recorded child, alive or not."""
        rows = self.rows("SELECT * FROM processes ORDER BY name")
        return [_process(row) for row in rows]

    def unrecorded_processes(self) -> list[ProcessRow]:
        """Process trees that run for this fleet without a record: their supervisor died while its
        disk failed, or between a spawn and its record.
        """
        recorded = {row.token for row in self.processes() if row.identity is not None}
        return [row for row in live_processes(self.path.parent) if row.token not in recorded]

    @understood
    def process(self, name: str) -> ProcessRow | None:
        """The recorded child of this name."""
        row = self.row("SELECT * FROM processes WHERE name = ?", name)
        return None if row is None else _process(row)

    def save_process(self, row: ProcessRow) -> None:
        """Write one child's row, replacing the previous one."""
        identity = row.identity
        self.write(
            "INSERT OR REPLACE INTO processes (name, role, phase, token, pid, create_time, "
            "boot_id, spec_hash, host, port, gpus, started_at, descendants, settings) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row.name, row.role, row.phase, row.token,
            identity and identity.pid, identity and identity.create_time,
            identity and identity.boot_id, row.spec_hash, row.host, row.port,
            json.dumps(row.gpus), row.started_at,
            json.dumps([asdict(d) for d in row.descendants]), json.dumps(row.settings),
        )  # fmt: skip

    def mark_stale(self, name: str) -> None:
        """Record that the process is gone; its port is remembered."""
        self.write("UPDATE processes SET phase = 'stale' WHERE name = ?", name)

    def forget_process(self, name: str) -> None:
        self.write("DELETE FROM processes WHERE name = ?", name)

    # --- servers -----------------------------------------------------------------------------

    @understood
    def servers(self) -> list[ServerRow]:
        """The intended state of each server of the fleet."""
        return [_server(row) for row in self.rows("SELECT * FROM servers ORDER BY name")]

    @understood
    def server(self, name: str) -> ServerRow:
        """One server's row; an unknown server is meant to run the base model."""
        row = self.row("SELECT * FROM servers WHERE name = ?", name)
        return ServerRow(name) if row is None else _server(row)

    def update_server(self, name: str, **changes: Any) -> ServerRow:
        """Change fields of one server's row and return it."""
        with self.transaction():
            self.update_servers({name: changes})
            return self.server(name)

    def update_servers(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change fields of several servers' rows, named as in `ServerRow`, in one transaction.

        Fields that are not named stay as they are, even if another process changes them.
        """
        with self.transaction():
            rows: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}  # by the fields they change
            for name, fields in changes.items():
                replace(ServerRow(name), **fields)  # unknown field: TypeError
                inserted = {"name": name, "paused": 0, "sleep_level": 0, **fields}
                rows.setdefault(tuple(fields), []).append(tuple(inserted.values()))
            for changing, alike in rows.items():
                columns = dict.fromkeys(("name", "paused", "sleep_level", *changing))
                changed = ", ".join(f"{field} = excluded.{field}" for field in changing)
                self.write_rows(
                    f"INSERT INTO servers ({', '.join(columns)})",
                    alike,
                    f"ON CONFLICT (name) DO {f'UPDATE SET {changed}' if changed else 'NOTHING'}",
                )

    def rename_servers(self, renamed: Mapping[str, str]) -> None:
        """Give everything that is recorded of these servers to their new names, in one step: names
        may be exchanged.
        """
        with self.transaction():
            for table, column in _BY_SERVER.items() if renamed else ():
                for name, new in renamed.items():
                    self.write(
                        f"UPDATE {table} SET {column} = ? WHERE {column} = ?",
                        f"{_RENAMING}{new}",
                        name,
                    )
                self.write(
                    f"UPDATE {table} SET {column} = substr({column}, 2) "
                    f"WHERE substr({column}, 1, 1) = ?", _RENAMING,
                )  # fmt: skip

    def forget_server(self, name: str) -> None:
        with self.transaction():
            self.write("DELETE FROM servers WHERE name = ?", name)
            self.write("DELETE FROM in_doubt WHERE server = ?", name)
            self.write("DELETE FROM server_adapters WHERE server = ?", name)

    # --- the fleet ---------------------------------------------------------------------------

    @understood
    def weights(self) -> FleetWeights:
        """The weights of the last successful push; all None for the base model."""
        recorded = self.get("weights")
        return FleetWeights(**json.loads(recorded)) if recorded else FleetWeights()

    def checkpoints(self) -> set[str | None]:
        """Every checkpoint that the fleet or one of its servers runs by the record."""
        canary = self.canary()
        intended = (self.weights(), canary.weights) if canary else (self.weights(),)
        return {row.checkpoint for row in (*intended, *self.servers())}

    def set_weights(self, weights: FleetWeights) -> None:
        """Every server is to have these: a canary is over."""
        with self.transaction():
            self.set("weights", json.dumps(asdict(weights)))
            self.set_canary(None)

    @understood
    def canary(self) -> Canary | None:
        """The canary that runs, begins or ends; None if there is none."""
        recorded = self.get(_CANARY_KEY)
        return Canary.from_json(json.loads(recorded)) if recorded else None

    def set_canary(self, canary: Canary | None) -> None:
        self.set(_CANARY_KEY, json.dumps(asdict(canary)) if canary else "")

    def weights_of(self, server: str) -> FleetWeights:
        """The weights that this server must have: the canary's if it serves on it."""
        canary = self.canary()
        return canary.weights if canary and canary.serves_on(server) else self.weights()

    def get(self, key: str) -> str | None:
        """A remembered value of the fleet as a whole (`file`, `base_dir` …)."""
        row = self.row("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row["value"])

    def set(self, key: str, value: str) -> None:
        self.write("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    @property
    def drained(self) -> bool:
        """Whether load balancers in front are to send nothing more."""
        return bool(self.get(_DRAINED_KEY))

    def set_drained(self, on: bool) -> None:
        self.set(_DRAINED_KEY, "1" if on else "")

    @property
    def holder(self) -> str:
        """Names this fleet to the guards of its servers, as the maker of a freeze: an id, and words
        for people. "" where it is not on disk: another process could not thaw what it froze.
        """
        if not self._holder:
            self._holder = self.get(_HOLDER_KEY) or self._new_holder()
        return self._holder

    def _new_holder(self) -> str:
        shown = f"fleet {self.path.parent.name} on {socket.gethostname()}"
        holder = f"{secrets.token_hex(16)} {shown.encode('ascii', 'replace').decode()}"
        insert = "INSERT OR IGNORE INTO meta VALUES (?, ?)"  # another process may have been faster
        try:
            self.write(insert, _HOLDER_KEY, holder, durable=True)
        except StateUnwritable:
            return ""
        return self.get(_HOLDER_KEY) or ""

    def prune(self) -> None:
        """Drop now what exceeds the retention."""
        prune(self)

    def forget_run(self) -> None:
        """After `down`: no processes, no intended states, base weights. History stays."""
        with self.transaction():
            for table in (
                "processes",
                "servers",
                "in_doubt",
                "adapters",
                "adapter_versions",
                "server_adapters",
                "launches",
            ):
                self.write(f"DELETE FROM {table}")
            self.write(
                "DELETE FROM meta WHERE key IN "
                "('weights', 'ports', 'pins', 'going_down', 'restarts', "
                f"'{BASE_KEY}', '{_CANARY_KEY}', '{_DRAINED_KEY}')"
            )

    def add_event(
        self, subject: str, message: str, kind: FleetEvent | None = None, **details: Any
    ) -> None:
        """One line of history about a process or the fleet. With a `kind`, the supervisor is told
        once it is committed, with details that are not recorded here.
        """
        at = time.time()
        written = self.write(
            "INSERT INTO events (at, subject, message) VALUES (?, ?, ?)", at, subject, message
        )
        if kind is not None:
            event = Event(at, subject, message, written.lastrowid or 0)
            self.once_committed(lambda: self.on_event(kind, event, details))
        if written.lastrowid and written.lastrowid % _PRUNE_EVERY_EVENTS == 0:
            prune_events(self)

    def events(self, limit: int = 100, *, after: int = 0, since: float = 0.0) -> list[Event]:
        """The latest events, oldest first: numbered above `after`, and not older than `since`."""
        rows = self.rows(
            "SELECT at, subject, message, sequence FROM events WHERE sequence > ? AND at >= ? "
            "ORDER BY sequence DESC LIMIT ?",
            after, since, limit,
        )  # fmt: skip
        return [Event(*row) for row in reversed(rows)]


def _ignore(kind: FleetEvent, event: Event, details: Mapping[str, Any]) -> None:
    """Outside the supervisor nothing follows from an event."""


def _process(row: sqlite3.Row) -> ProcessRow:
    identity = None
    if row["pid"] is not None:
        identity = ProcessIdentity(row["pid"], row["create_time"], row["boot_id"])
    return ProcessRow(
        row["name"], row["role"], row["phase"], row["token"], identity,
        row["spec_hash"], row["host"], row["port"], tuple(json.loads(row["gpus"])),
        row["started_at"],
        tuple(ProcessIdentity(**identity) for identity in json.loads(row["descendants"])),
        json.loads(row["settings"]),
    )  # fmt: skip


def _server(row: sqlite3.Row) -> ServerRow:
    flags = {name: bool(row[name]) for name in ("paused", "weights_awake", "located")}
    return ServerRow(**{**dict(row), **flags})
