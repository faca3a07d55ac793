"""Rows of the ledger, and their form in the API. Functions of one open transaction."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


class Missing(LookupError):
    """There is no such thing; the text is for the client."""


def request_id(owner: str, seq: int) -> str:
    """A request's id, the same however often it is sent."""
    return f"{owner}:{seq}"


def is_accepted(connection: sqlite3.Connection, owner: str, seq: int, kind: str) -> bool:
    """Whether this request was accepted before. Raises ValueError if it was a different one."""
    row = connection.execute(
        "SELECT kind FROM requests WHERE owner = ? AND seq = ?", (owner, seq)
    ).fetchone()
    if row is not None and row["kind"] != kind:
        raise ValueError(f"seq_id {seq} was a {row['kind']}, and cannot be a {kind} now")
    return row is not None


def add_request(
    connection: sqlite3.Connection,
    owner: str,
    seq: int,
    kind: str,
    extra: Mapping[str, Any] | None = None,
    body: bytes | None = None,
) -> None:
    """Accept a request."""
    text = None if extra is None else json.dumps(extra)
    connection.execute(
        "INSERT INTO requests (id, owner, seq, kind, body, extra, created) VALUES (?,?,?,?,?,?,?)",
        (request_id(owner, seq), owner, seq, kind, body, text, time.time()),
    )


def add_model(
    connection: sqlite3.Connection,
    name: str,
    session: str,
    config: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
) -> None:
    """Add a model that its first request will create."""
    now = time.time()
    connection.execute(
        "INSERT INTO models (id, session, config, metadata, created, used) VALUES (?,?,?,?,?,?)",
        (name, session, json.dumps(config), json.dumps(metadata), now, now),
    )


def model(connection: sqlite3.Connection, name: str) -> sqlite3.Row:
    """A model's row. Raises Missing."""
    return _row(connection, "models", "id", name, f"there is no model {name}")


def running(connection: sqlite3.Connection, name: str) -> sqlite3.Row:
    """The row of a model that can be trained. Raises Missing."""
    row = model(connection, name)
    if row["ended"] is not None:
        raise Missing(
            f"the run {name} has ended, as its client was gone: continue from a checkpoint "
            "(create_training_client_from_state_with_optimizer)"
        )
    return row


def checkpoint(connection: sqlite3.Connection, path: str) -> sqlite3.Row:
    """A checkpoint's row. Raises Missing."""
    return _row(connection, "checkpoints", "path", path, f"there is no checkpoint {path}")


def sampler(connection: sqlite3.Connection, name: str) -> sqlite3.Row:
    """A sampler's row. Raises Missing."""
    return _row(connection, "samplers", "id", name, f"there is no sampling session {name}")


def _row(
    connection: sqlite3.Connection, table: str, column: str, value: str, missing: str
) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(
        f"SELECT * FROM {table} WHERE {column} = ?", (value,)
    ).fetchone()
    if row is None:
        raise Missing(missing)
    return row


def session(connection: sqlite3.Connection, name: str) -> dict[str, Any]:
    """GET sessions/{id}. Raises Missing."""
    row = _row(connection, "sessions", "id", name, f"there is no session {name}")
    models = connection.execute("SELECT id FROM models WHERE session = ?", (name,)).fetchall()
    samplers = connection.execute("SELECT id FROM samplers WHERE session = ?", (name,)).fetchall()
    return {
        "training_run_ids": [entry["id"] for entry in models],
        "sampler_ids": [entry["id"] for entry in samplers],
        "user_metadata": _texts(row["metadata"]),
        "display_name": row["display_name"],
    }


def runs(connection: sqlite3.Connection, limit: int, offset: int) -> dict[str, Any]:
    """GET training_runs: the latest first."""
    rows = connection.execute(
        "SELECT * FROM models ORDER BY used DESC LIMIT ? OFFSET ?", (limit, offset)
    ).fetchall()
    total = connection.execute("SELECT COUNT(*) FROM models").fetchone()[0]
    return {
        "training_runs": [run(connection, row) for row in rows],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


def run(connection: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
    """GET training_runs/{id}."""
    config = json.loads(row["config"])

    def last(kind: str) -> dict[str, Any] | None:
        checkpoint = connection.execute(
            "SELECT * FROM checkpoints WHERE model = ? AND kind = ? AND NOT hidden "
            "ORDER BY created DESC LIMIT 1",
            (row["id"], kind),
        ).fetchone()
        return None if checkpoint is None else _checkpoint_json(checkpoint)

    return {
        "training_run_id": row["id"],
        "base_model": config["base"],
        "model_owner": "skyctl",
        **rank(config),
        "corrupted": False,
        "last_request_time": _time(row["used"]),
        "last_checkpoint": last("training"),
        "last_sampler_checkpoint": last("sampler"),
        "user_metadata": _texts(row["metadata"]),
    }


def rank(config: Mapping[str, Any]) -> dict[str, Any]:
    """How a model is trained, in the API's form."""
    rank = config["lora"]["rank"]
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def checkpoints(
    connection: sqlite3.Connection, owner: str | None, limit: int, offset: int
) -> dict[str, Any]:
    """GET checkpoints, or those of one model. Raises Missing."""
    if owner is not None:
        model(connection, owner)
    where = "WHERE NOT hidden AND (? IS NULL OR model = ?)"
    rows = connection.execute(
        f"SELECT * FROM checkpoints {where} ORDER BY created DESC LIMIT ? OFFSET ?",
        (owner, owner, limit, offset),
    ).fetchall()
    sql = f"SELECT COUNT(*) FROM checkpoints {where}"
    total = connection.execute(sql, (owner, owner)).fetchone()[0]
    return {
        "checkpoints": [_checkpoint_json(row) for row in rows],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


def _checkpoint_json(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "checkpoint_id": row["path"].split("/", 3)[-1],
        "checkpoint_type": row["kind"],
        "time": _time(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["size"],
        "public": bool(row["public"]),
        "user_metadata": _texts(row["metadata"]),
        "expires_at": None if row["expires"] is None else _time(row["expires"]),
    }


def finished(
    connection: sqlite3.Connection, owner: str, clone: int, after: int
) -> Sequence[sqlite3.Row]:
    """Requests of one clone of a sampler that ended after the cursor, in their order."""
    return connection.execute(
        "SELECT id, state, done_order, LENGTH(result) AS size FROM requests WHERE owner = ? AND "
        "done_order > ? AND seq / 1000000000 = ? AND state IN ('done', 'failed') "
        "ORDER BY done_order LIMIT 1000",
        (owner, after, clone),
    ).fetchall()


def forget_results(connection: sqlite3.Connection, owner: str, names: Iterable[str]) -> None:
    """Drop results that their client has received."""
    connection.executemany(
        "UPDATE requests SET state = 'gone', result = NULL WHERE id = ? AND owner = ? "
        "AND state IN ('done', 'failed')",
        [(name, owner) for name in names],
    )


def _texts(text: str | None) -> dict[str, str] | None:
    values = json.loads(text) if text else None
    return None if values is None else {key: str(value) for key, value in values.items()}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
