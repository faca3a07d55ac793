"""What goes by itself: checkpoints whose time is over, weights that were saved for one sampling
client, runs whose client is gone, and results.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import time
from dataclasses import dataclass

from skyctl.errors import SkyctlError, StateUnwritable
from skyctl.tinker.ledger import Ledger
from skyctl.tinker.sampling import Sampling
from skyctl.tinker.training import Training

_LOG = logging.getLogger(__name__)
INTERVAL_S = 20.0
UNUSED_MODEL_S = 600.0
"""A whole model that was saved for a sampling client is kept this long after its last use."""
RECENT_S = 600.0
"""An adapter that was used since stays, however many newer ones there are."""
FINISHED_S = 600.0
"""A session that its client has finished is kept this long."""
RESULT_S = 24 * 3600.0


@dataclass(frozen=True)
class Keep:
    """How much is kept."""

    runs_s: float = 7 * 86400.0
    """Seconds after which a run goes whose client sends no heartbeats."""
    samplers: int = 32
    """A model's latest adapters that were saved for a sampling client without a name."""
    samplers_s: float = 7200.0
    """Seconds that such an adapter is kept after its last use."""
    recent_s: float = RECENT_S
    """Seconds since its last use in which no number of newer ones removes it."""
    finished_s: float = FINISHED_S
    """Seconds that a finished session is kept."""


@dataclass(frozen=True)
class Housekeeping:
    """Of one API process; `run` works until it is cancelled."""

    ledger: Ledger
    training: Training
    sampling: Sampling
    keep: Keep

    async def run(self) -> None:
        """Remove what is old, again and again."""
        while True:
            try:
                await self.remove_old()
            except StateUnwritable as error:  # it waits until there is room; clients are told
                _LOG.warning("%s", error)
            await asyncio.sleep(INTERVAL_S)

    async def remove_old(self) -> None:
        """Remove what is old now."""
        now = time.time()
        for row in await self._over(now):
            try:
                await self.sampling.delete(row)
            except SkyctlError as error:  # servers have it, and keep it for now
                _LOG.warning("%s: %s", row["directory"], error.message)
        await self.ledger.write(
            "UPDATE requests SET state = 'gone', result = NULL WHERE state IN ('done', 'failed') "
            "AND result IS NOT NULL AND done_at < ? AND seq > 0",
            now - RESULT_S,
        )
        ended = await self.ledger.rows(
            "SELECT id FROM sessions WHERE seen < ? OR (finished IS NOT NULL AND seen < ?)",
            now - self.keep.runs_s,
            now - self.keep.finished_s,
        )
        for row in ended:
            await self._end(row["id"])
        await self.ledger.run(lambda c: _forget_ended(c, now - self.keep.samplers_s))

    async def _over(self, now: float) -> list[sqlite3.Row]:
        """Checkpoints that no client can name any more, or whose time is over."""
        used = (
            "SELECT checkpoints.*, json_extract(config, '$.lora.rank') AS rank, (SELECT MAX(used) "
            "FROM samplers WHERE samplers.path = checkpoints.path) AS last, path IN (SELECT "
            "samplers.path FROM requests JOIN samplers ON samplers.id = owner WHERE "
            "state = 'accepted' AND samplers.path IS NOT NULL) AS in_use FROM checkpoints"
        )
        return await self.ledger.rows(
            f"WITH seen AS ({used}), ranked AS (SELECT *, ROW_NUMBER() OVER "
            "(PARTITION BY model, hidden ORDER BY created DESC) AS place FROM seen) "
            "SELECT * FROM ranked WHERE expires < ? OR (hidden AND NOT in_use AND "
            "(last IS NULL OR last <= CASE rank WHEN 0 THEN ? ELSE ? END "
            "OR (rank AND place > ? AND last <= ?)))",
            now,
            now - UNUSED_MODEL_S,
            now - self.keep.samplers_s,
            self.keep.samplers,
            now - self.keep.recent_s,
        )

    async def _end(self, session: str) -> None:
        """End the runs of a session: their checkpoints stay, and cannot be trained on in place."""
        models = await self.ledger.rows(
            "SELECT id, snapshot FROM models WHERE session = ? AND ended IS NULL", session
        )
        if not await self.training.forget([row["id"] for row in models], session):
            return  # it still computes for it
        for row in models:
            if row["snapshot"] is not None:
                shutil.rmtree(row["snapshot"], ignore_errors=True)


def _forget_ended(connection: sqlite3.Connection, unused: float) -> None:
    """Forget runs that ended and have no checkpoint, and samplers without a session."""
    connection.execute(
        "DELETE FROM models WHERE ended IS NOT NULL AND NOT EXISTS "
        "(SELECT 1 FROM checkpoints WHERE checkpoints.model = models.id)"
    )
    over = (
        "SELECT id FROM samplers WHERE used < ? AND session NOT IN (SELECT id FROM sessions) AND "
        "NOT EXISTS (SELECT 1 FROM requests WHERE owner = samplers.id AND state = 'accepted')"
    )
    connection.execute(f"DELETE FROM requests WHERE owner IN ({over})", (unused,))
    connection.execute(f"DELETE FROM samplers WHERE id IN ({over})", (unused,))
