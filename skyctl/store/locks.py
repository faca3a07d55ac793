"""Named exclusive locks of a fleet: they say who holds them and die with their holder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from skyctl.errors import ConflictError
from skyctl.store.database import Database, understood
from skyctl.store.identity import ProcessIdentity, own_identity
from skyctl.units import format_seconds


@dataclass(frozen=True)
class LockHolder:
    """Who holds a lock. `holder` is a command or a job, `since` in seconds since the epoch."""

    name: str
    identity: ProcessIdentity
    holder: str
    since: float


class Locks:
    """The lock table of one fleet. A lock whose holder is dead counts as free."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @understood
    def holder(self, name: str) -> LockHolder | None:
        """The live holder of a lock, None when it is free."""
        row = self._database.row("SELECT * FROM locks WHERE name = ?", name)
        if row is None:
            return None
        identity = ProcessIdentity(row["pid"], row["create_time"], row["boot_id"])
        if not identity.alive():
            return None
        return LockHolder(name, identity, row["holder"], row["since"])

    def acquire(self, name: str, holder: str) -> None:
        """Take the lock for this process.

        Raises:
            ConflictError: a live process holds it; `details["holder"]` names it.
        """
        own = own_identity()
        with self._database.transaction():
            found = self.holder(name)
            if found is not None:
                held = format_seconds(max(0.0, time.time() - found.since))
                raise ConflictError(
                    f"{found.holder} (pid {found.identity.pid}) holds the {name} lock of this "
                    f"fleet, for {held}",
                    hint=_patience(found.holder),
                    details={"holder": found.holder, "pid": found.identity.pid},
                )
            self._database.write(
                "INSERT OR REPLACE INTO locks VALUES (?, ?, ?, ?, ?, ?)",
                name, own.pid, own.create_time, own.boot_id, holder, time.time(),
            )  # fmt: skip

    def rename(self, name: str, holder: str) -> None:
        """Say more about why this process holds the lock."""
        self._database.write(
            "UPDATE locks SET holder = ? WHERE name = ? AND pid = ?",
            holder, name, own_identity().pid,
        )  # fmt: skip

    def release(self, name: str) -> None:
        """Give the lock back, if this process holds it."""
        own = own_identity()
        self._database.write(
            "DELETE FROM locks WHERE name = ? AND pid = ? AND create_time = ?",
            name, own.pid, own.create_time,
        )  # fmt: skip

    @contextmanager
    def hold(self, name: str, holder: str, *, wait_s: float = 0.0) -> Iterator[None]:
        """Hold the lock while the block runs; waits up to `wait_s` seconds for a live holder."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self.acquire(name, holder)
                break
            except ConflictError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)
        try:
            yield
        finally:
            self.release(name)


def _patience(holder: str) -> str:
    """How to wait for who holds a lock."""
    if holder.startswith("job "):
        return f"wait for it to end: skyctl jobs wait {holder.removeprefix('job ')}"
    return "wait for it to end"
