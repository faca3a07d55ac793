"""The kinds of training requests, their outcomes, and how these are recorded."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CREATE, LOAD = "create_model", "load_weights"
SAVE, SAVE_SAMPLER = "save_weights", "save_weights_for_sampler"
SAVE_EXTERNAL = "save_weights_external"
_CHECKPOINTS = {SAVE: "training", SAVE_SAMPLER: "sampler", SAVE_EXTERNAL: "external"}
FORWARD, FORWARD_BACKWARD, OPTIM_STEP = "forward", "forward_backward", "optim_step"

Statement = tuple[str, tuple[Any, ...]]
"""SQL and its parameters."""


@dataclass
class Outcome:
    """The outcome of a request."""

    result: bytes = b"{}"
    """What the client gets: an answer, or the text of a failure."""
    type: str = "application/json"
    """The media type of an answer."""
    category: str = ""
    """Of a failure, user or server; "" for an answer."""
    rows: list[Statement] = field(default_factory=list)
    """Further statements of the commit that records it."""
    snapshot: str | None = None
    """The directory of a snapshot that was taken with it."""
    unit: int | None = None
    """The seq id of the first of several requests that were computed together."""


def skip_gap(
    model: str, missing: int, connection: sqlite3.Connection
) -> tuple[list[sqlite3.Row], bool]:
    """Fail the requests after a missing one, none if it has come by now: once this is committed
    it is refused. Returns them, and whether the next step is broken.
    """
    sql = "SELECT * FROM requests WHERE owner = ? AND seq >= ? ORDER BY seq"
    rows = connection.execute(sql, (model, missing)).fetchall()
    if rows[0]["seq"] == missing:
        return [], False
    outcome = failed_with(f"request {missing} of this model never came", "user")
    broken = True  # it may have been a forward_backward
    for row in rows:
        broken = row["kind"] == FORWARD_BACKWARD or (broken and row["kind"] != OPTIM_STEP)
        record_outcome(connection, row, outcome)
    connection.execute(
        "UPDATE models SET done_seq = ?, broken = ?, used = ? WHERE id = ?",
        (rows[-1]["seq"], broken, time.time(), model),
    )
    return rows, broken


def record_outcome(connection: sqlite3.Connection, row: sqlite3.Row, outcome: Outcome) -> None:
    """Give a request its outcome. A body that no replay needs is dropped."""
    replayed = row["kind"] == FORWARD_BACKWARD and not outcome.category
    order = connection.execute("SELECT COALESCE(MAX(done_order), 0) + 1 FROM requests").fetchone()
    state, now = "failed" if outcome.category else "done", time.time()
    connection.execute(
        "UPDATE requests SET state = ?, result = ?, type = ?, category = ?, done_at = ?, "
        "done_order = ?, body = CASE WHEN ? THEN body END WHERE id = ?",
        (state, outcome.result, outcome.type, outcome.category, now, order[0], replayed, row["id"]),
    )
    if outcome.unit is not None:  # who repeats them computes them together again
        text = json.dumps({"unit": outcome.unit})
        connection.execute("UPDATE requests SET extra = ? WHERE id = ?", (text, row["id"]))


def answered(value: dict[str, Any]) -> Outcome:
    return Outcome(json.dumps(value).encode())


def failed_with(message: str, category: str) -> Outcome:
    return Outcome(message.encode(), category=category)


def add_checkpoint(
    model: str, kind: str, directory: str, config: str, size: int, extra: Mapping[str, Any]
) -> Iterator[Statement]:
    """A saved checkpoint takes its path, and the one that had it is hidden."""
    path, now, ttl = extra["path"], time.time(), extra.get("ttl_seconds")
    # an overwritten checkpoint goes like those that no client can name any more
    hide = "UPDATE checkpoints SET path = path || '#' || directory, hidden = 1 WHERE path = ?"
    yield hide, (path,)
    yield (
        "INSERT INTO checkpoints (path, model, kind, name, directory, config, optimizer, "
        "created, size, metadata, expires, hidden) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            path,
            model,
            _CHECKPOINTS[kind],
            path.rsplit("/", 1)[-1],
            directory,
            config,
            int(kind == SAVE),
            now,
            size,
            json.dumps(extra.get("metadata")),
            None if ttl is None else now + ttl,
            int("sampler" in extra),
        ),
    )


def add_sampler(model: str, extra: Mapping[str, Any]) -> Iterator[Statement]:
    """A sampling session begins at a checkpoint that was saved for it."""
    path, now = extra["path"], time.time()
    inflight = model if extra["inflight"] else None
    yield (
        "INSERT OR REPLACE INTO samplers (id, session, path, inflight, created, used) "
        "VALUES (?,?,?,?,?,?)",
        (extra["sampler"], extra["session"], path, inflight, now, now),
    )
    # those that follow this model move on together; NULL equals none of them
    yield "UPDATE samplers SET path = ? WHERE inflight = ?", (path, inflight)
