"""LoRA adapters of a fleet: which version of each it serves, and what each server holds.

    adapters           version   target     meaning
                       –         –          unloaded; its numbers are not used again
                       –         1          is being loaded, or was when its process died
                       3         –          served by every server that is routed
                       3         4          is being synced: whole on every server, or undone
                       3         0          is being unloaded

A target is on record before anything is sent, and cleared once every server has done it or the
change was undone everywhere. A process that finds one while it holds the adapters lock undoes it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from skyctl.store.state import FleetState

LOCK = "adapters"
"""Held by a process that changes adapters."""
UNLOAD = 0


@dataclass(frozen=True)
class AdapterVersion:
    """One version of one adapter."""

    name: str
    """Of the adapter."""
    version: int
    """Counted up with each."""
    path: str
    """The fleet's own copy."""
    digest: str
    """Covers every byte of it."""
    source: str
    """What the copy was made from."""
    rank: int
    """The largest of its modules."""
    bytes: int
    """Its size."""
    at: float
    """When it was loaded, in epoch seconds."""
    servers: tuple[str, ...] = ()
    """Those that serve it, as recorded."""

    @property
    def served_as(self) -> str:
        """The name that servers give this very version, also in their answers."""
        return f"{self.name}@{self.version}"

    def to_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        return {key: value for key, value in asdict(self).items() if key != "path"}


_COLUMNS = "v.name, v.version, v.path, v.digest, v.source, v.rank, v.bytes, v.at"


def served(state: FleetState) -> dict[str, AdapterVersion]:
    """The adapters every routed server must have, by name."""
    holders: dict[tuple[str, int], list[str]] = {}
    with state.understanding():
        for row in state.rows("SELECT * FROM server_adapters ORDER BY server"):
            holders.setdefault((row["name"], row["version"]), []).append(row["server"])
        rows = state.rows(
            f"SELECT {_COLUMNS} FROM adapter_versions v JOIN adapters a "
            "ON a.name = v.name AND a.version = v.version ORDER BY v.name"
        )
        return {
            row["name"]: AdapterVersion(
                **dict(row), servers=tuple(holders.get((row["name"], row["version"]), ()))
            )
            for row in rows
        }


def recorded(state: FleetState, server: str) -> dict[str, int]:
    """The recorded version of each adapter on this server."""
    rows = state.rows("SELECT * FROM server_adapters WHERE server = ?", server)
    return {row["name"]: row["version"] for row in rows}


def names(state: FleetState) -> frozenset[str]:
    """Every name the fleet has ever served: an adapter of that name on a server is the fleet's."""
    return frozenset(row["name"] for row in state.rows("SELECT name FROM adapters"))


def is_current(state: FleetState, server: str) -> bool:
    """Whether this server has what every routed server must have, as recorded."""
    current = {name: adapter.version for name, adapter in served(state).items()}
    return recorded(state, server) == current


def unfinished(state: FleetState) -> dict[str, int]:
    """Targets of changes that are under way or were interrupted, by name."""
    rows = state.rows("SELECT name, target FROM adapters WHERE target IS NOT NULL")
    return {row["name"]: row["target"] for row in rows}


def next_version(state: FleetState, name: str) -> int:
    """The next unused version number of this name."""
    row = state.row("SELECT last FROM adapters WHERE name = ?", name)
    return 1 if row is None else row["last"] + 1


def intend_version(state: FleetState, new: AdapterVersion, servers: Collection[str]) -> None:
    """A version is about to be sent to these servers: from here on it is unknown which they hold.

    Raises:
        StateUnwritable: that cannot be put on record.
    """
    with state.durable():
        state.write(
            "INSERT INTO adapters (name, last, target) VALUES (?, ?, ?) ON CONFLICT (name) "
            "DO UPDATE SET last = excluded.last, target = excluded.target",
            new.name, new.version, new.version,
        )  # fmt: skip
        state.write(
            "INSERT INTO adapter_versions "
            "(name, version, path, digest, source, rank, bytes, at, until) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
            new.name, new.version, new.path, new.digest, new.source, new.rank, new.bytes, new.at,
        )  # fmt: skip
        _in_doubt(state, new.name, servers)


def intend_name(state: FleetState, name: str) -> None:
    """The version that was sent is about to get the name: from here on clients may request it."""
    with state.transaction():
        state.write(
            "UPDATE adapter_versions SET until = NULL WHERE name = ? AND version = "
            "(SELECT target FROM adapters WHERE name = ?)",
            name, name,
        )  # fmt: skip


def intend_unload(state: FleetState, name: str, servers: Collection[str]) -> None:
    """An adapter is about to be unloaded from these servers. Raises StateUnwritable."""
    with state.durable():
        state.write("UPDATE adapters SET target = ? WHERE name = ?", UNLOAD, name)
        _in_doubt(state, name, servers)


def commit(state: FleetState, name: str, servers: Collection[str]) -> None:
    """Record that these servers have completed the change of `name`."""
    with state.transaction():
        row = state.row("SELECT target FROM adapters WHERE name = ?", name)
        target = row["target"] or None if row is not None else None
        state.write(
            "UPDATE adapter_versions SET until = ? WHERE name = ? AND version IS NOT ? "
            "AND until IS NULL",
            time.time(), name, target,
        )  # fmt: skip
        intend_name(state, name)
        state.write("UPDATE adapters SET version = ?, target = NULL WHERE name = ?", target, name)
        # a server restarted meanwhile is no longer in doubt: it holds nothing
        doubted = "SELECT server FROM server_adapters WHERE name = ? AND version = 0"
        done = {row["server"] for row in state.rows(doubted, name)} & set(servers)
        state.write("DELETE FROM server_adapters WHERE name = ?", name)
        if target is not None:
            for server in done:
                _record(state, server, name, target)


def withdraw(state: FleetState, name: str) -> str:
    """The change of `name` was undone; a server where it was not is not current (`is_current`).
    Returns the path of the version that is not served then; "" if it was an unload.
    """
    with state.transaction():
        row = state.row(
            "SELECT target, path FROM adapters a LEFT JOIN adapter_versions v "
            "ON v.name = a.name AND v.version = a.target WHERE a.name = ?",
            name,
        )
        if row is None or row["target"] is None:
            return ""
        state.write(
            "UPDATE adapter_versions SET until = ? WHERE name = ? AND version = ? "
            "AND until IS NULL",
            time.time(), name, row["target"],
        )  # fmt: skip
        state.write("UPDATE adapters SET target = NULL WHERE name = ?", name)
    return row["path"] or ""


def record_server(state: FleetState, server: str, has: Mapping[str, AdapterVersion]) -> None:
    """Record that this server has these adapters and no others. A new process has none."""
    with state.transaction():
        state.write("DELETE FROM server_adapters WHERE server = ?", server)
        for name, adapter in has.items():
            _record(state, server, name, adapter.version)


def forget(state: FleetState) -> None:
    """Record that no server takes adapters any more."""
    remaining = served(state).keys() | unfinished(state).keys()
    if not remaining:
        return
    with state.durable():
        for name in remaining:
            intend_unload(state, name, ())
            commit(state, name, ())


def superseded(state: FleetState, before: float) -> list[AdapterVersion]:
    """Versions whose files exist, and which no client could request since `before` (epoch)."""
    rows = state.rows(
        f"SELECT {_COLUMNS} FROM adapter_versions v WHERE until IS NOT NULL AND until < ? "
        "AND NOT EXISTS (SELECT * FROM adapters a WHERE a.name = v.name AND a.target = v.version)",
        before,
    )
    return [AdapterVersion(**dict(row)) for row in rows]


def forget_version(state: FleetState, gone: AdapterVersion) -> None:
    """Forget a superseded version: its files may be removed."""
    state.write(
        "DELETE FROM adapter_versions WHERE name = ? AND version = ?", gone.name, gone.version
    )


def record_path(state: FleetState, adapter: AdapterVersion, path: str) -> None:
    """Record a new path of the fleet's own copy of a version."""
    state.write(
        "UPDATE adapter_versions SET path = ? WHERE name = ? AND version = ?",
        path, adapter.name, adapter.version,
    )  # fmt: skip


def kept_paths(state: FleetState) -> set[str | None]:
    """Every copy that must stay."""
    return {row["path"] for row in state.rows("SELECT path FROM adapter_versions")}


def requested_paths(state: FleetState) -> list[str]:
    """The copies of versions that clients request, or may have requested."""
    rows = state.rows("SELECT path FROM adapter_versions WHERE until IS NULL OR until > 0")
    return [row["path"] for row in rows if row["path"]]


def _in_doubt(state: FleetState, name: str, servers: Collection[str]) -> None:
    """Record these servers as holding an unknown version, until they are recorded again."""
    for server in servers:
        state.write(
            "INSERT OR REPLACE INTO server_adapters (server, name, version, digest) "
            "VALUES (?, ?, 0, '')",
            server, name,
        )  # fmt: skip


def _record(state: FleetState, server: str, name: str, version: int) -> None:
    state.write(
        "INSERT OR REPLACE INTO server_adapters SELECT ?, name, version, digest "
        "FROM adapter_versions WHERE name = ? AND version = ?",
        server, name, version,
    )  # fmt: skip
