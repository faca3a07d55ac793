"""Which weights have which digest: learned from pushes and launches, enforced from then on.

A version's label is only a name. A server is known to hold certain weights if its digest is the one
that the same content had before, in servers that hold the model in the same arrangement
(`push/verify.py`) and run the same engine version.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from skyctl.store.database import Database, understood

MOST = 512
"""How many digests are kept; the least recently seen are dropped first."""


@dataclass(frozen=True)
class ExpectedDigest:
    """The digest of a content in an engine.

    `content` names the bytes (`push/expected.py`), `engine` its version and, if known, its
    arguments. `digest` ends in its arrangement. `origin`: a push whose servers agreed and matched
    the checkpoint, or vLLM's own loading at a launch.
    """

    content: str
    engine: str
    digest: str
    origin: Literal["push", "launch"] = "push"

    @property
    def arrangement(self) -> str:
        return self.digest.partition(":")[2]


@dataclass(frozen=True)
class BrokenReload:
    """A model (the layout digest of its checkpoints) whose weights get another digest when pushed
    than when vLLM loads them; `model` is its name at that time.
    """

    layout: str
    engine: str
    model: str


@dataclass(frozen=True)
class Expectations:
    """All digests that a fleet remembers."""

    digests: tuple[ExpectedDigest, ...] = ()
    broken: tuple[BrokenReload, ...] = ()

    def with_learned(self, rows: Iterable[Mapping[str, Any]]) -> Expectations:
        """These and what a push has learned; newer ones come first."""
        learned = tuple(ExpectedDigest(**row) for row in rows)
        return Expectations((*learned, *self.digests), self.broken)


@dataclass
class Learned:
    """What one push found out. Its JSON is part of the push's result and of its error."""

    digests: list[ExpectedDigest] = field(default_factory=list)
    broken: BrokenReload | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "digests": [asdict(digest) for digest in self.digests],
            "broken": self.broken and asdict(self.broken),
        }


def by_files(identity_digest: str) -> str:
    """Names the bytes of a checkpoint's files as long as no process writes to them."""
    return f"files:{identity_digest}"


class ExpectedDigests:
    """The tables behind the expectations, in a fleet's state file."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @understood
    def everything(self) -> Expectations:
        """Everything that is remembered, newest first."""
        digests = self._database.rows(
            "SELECT content, engine, digest, origin FROM expected_digests ORDER BY at DESC"
        )
        broken = self._database.rows(
            "SELECT layout, engine, model FROM broken_reloads ORDER BY at DESC"
        )
        return Expectations(
            tuple(ExpectedDigest(*row) for row in digests),
            tuple(BrokenReload(*row) for row in broken),
        )

    def learn(self, learned: Mapping[str, Any] | None) -> None:
        """Remember what a push found out, if anything: `learned` of its result or of its error's
        details (`Learned`, as JSON).
        """
        if not learned:
            return
        now = time.time()
        with self._database.transaction():
            rows = [
                (
                    digest.content,
                    digest.engine,
                    digest.arrangement,
                    digest.origin,
                    digest.digest,
                    now,
                )
                for digest in (ExpectedDigest(**row) for row in learned.get("digests", ()))
            ]
            self._database.write_rows(
                "INSERT OR REPLACE INTO expected_digests "
                "(content, engine, arrangement, origin, digest, at)", rows
            )  # fmt: skip
            self._forget("expected_digests")
            if learned.get("broken"):
                broken = BrokenReload(**learned["broken"])
                self._database.write(
                    "INSERT OR REPLACE INTO broken_reloads (layout, engine, model, at) "
                    "VALUES (?, ?, ?, ?)",
                    broken.layout, broken.engine, broken.model, now,
                )  # fmt: skip
                self._forget("broken_reloads")

    def _forget(self, table: str) -> None:
        self._database.write(
            f"DELETE FROM {table} WHERE rowid NOT IN "
            f"(SELECT rowid FROM {table} ORDER BY at DESC LIMIT {MOST})"
        )

    def launched(self, server: str, content: str) -> None:
        """A server was launched with this content; "" if that is not certain."""
        self._database.write("INSERT OR REPLACE INTO launches VALUES (?, ?, 0)", server, content)

    def mark_other_settings(self, server: str) -> None:
        """A server was launched with other settings than its siblings; until its next launch."""
        self._database.write("UPDATE launches SET other_settings = 1 WHERE server = ?", server)

    @understood
    def other_settings(self) -> set[str]:
        """The servers that are marked so."""
        rows = self._database.rows("SELECT server FROM launches WHERE other_settings")
        return {row["server"] for row in rows}

    @understood
    def launches(self) -> dict[str, str]:
        """What each server was launched with, by name."""
        rows = self._database.rows("SELECT * FROM launches")
        return {row["server"]: row["content"] for row in rows}
