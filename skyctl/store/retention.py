"""How much of a fleet's history its state file keeps."""

from __future__ import annotations

import time

from skyctl.store.database import Database, Retention

RECENT = 50
"""Jobs and pushes that are kept at any age: what commands list, and what recovery reads."""
_OF_A_VERSION = 3
"""Pushes that are kept of each version that is served or kept: what a rollback reads."""
_DAY_S = 86_400.0


def prune(database: Database, retention: Retention) -> None:
    """Forget old jobs, pushes and events.

    Never a running job, one that left servers in doubt, or the latest `RECENT`; never the latest
    pushes of a version that a server has or the fleet keeps.
    """
    before = time.time() - retention.days * _DAY_S
    latest = max(retention.pushes, RECENT)
    with database.transaction():
        database.write(
            "DELETE FROM jobs WHERE state <> 'running' "
            "AND (number <= (SELECT max(number) FROM jobs) - ? OR created_at < ?) "
            "AND number <= (SELECT max(number) FROM jobs) - ? "
            "AND kind || '-' || number NOT IN (SELECT job FROM in_doubt)",
            latest, before, RECENT,
        )  # fmt: skip
        database.write("DELETE FROM job_events WHERE job NOT IN (SELECT number FROM jobs)")
        database.write(
            "DELETE FROM pushes WHERE (number <= (SELECT max(number) FROM pushes) - ? OR at < ?) "
            "AND number <= (SELECT max(number) FROM pushes) - ? AND number NOT IN ("
            "SELECT number FROM (SELECT number, row_number() OVER "
            "(PARTITION BY version ORDER BY number DESC) AS age FROM pushes WHERE version IN ("
            "SELECT weight_version FROM servers WHERE weight_version IS NOT NULL "
            "UNION SELECT json_extract(value, '$.version') FROM meta WHERE key = 'weights' "
            "UNION SELECT json_extract(kept.value, '$.version') FROM meta, json_each(meta.value) "
            "AS kept WHERE meta.key = 'kept_weights')) WHERE age <= ?)",
            latest, before, RECENT, _OF_A_VERSION,
        )  # fmt: skip
        prune_events(database, retention)


def prune_events(database: Database, retention: Retention) -> None:
    """Forget old lines of history."""
    database.write(
        "DELETE FROM events WHERE sequence <= (SELECT max(sequence) FROM events) - ? OR at < ?",
        retention.events, time.time() - retention.days * _DAY_S,
    )  # fmt: skip
