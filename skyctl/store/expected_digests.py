"""The digests that a fleet remembers, in its state file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from skyctl.store.database import Database, understood
from skyctl.store.expected import BrokenReload, Expectations, ExpectedDigest

MOST = 512
"""How many digests are kept; the least recently seen are dropped first."""


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
