"""What a supervisor does now and then, so that a fleet can run for months."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.local.rotation import rotate
from skyctl.store.paths import FleetPaths
from skyctl.supervisor import adapters

if TYPE_CHECKING:
    from skyctl.supervisor.resident import Supervisor

INTERVAL_S = 5.0
PRUNE_INTERVAL_S = 3600.0

_LOG = logging.getLogger(__name__)


async def keep_house(supervisor: Supervisor) -> None:
    """Logs, history and state are looked after until this is cancelled."""
    pruned_at = -PRUNE_INTERVAL_S
    while True:
        try:
            if supervisor.plan is not None:
                await look_after_logs(supervisor.paths, supervisor.plan.config)
            supervisor.state.complete()
            await adapters.retire(supervisor)
            if time.monotonic() - pruned_at > PRUNE_INTERVAL_S:
                supervisor.state.prune()
                pruned_at = time.monotonic()
        except Exception:
            _LOG.exception("housekeeping")
        await asyncio.sleep(INTERVAL_S)


async def look_after_logs(paths: FleetPaths, config: FleetConfig) -> None:
    """Rotate each log of the fleet that is too large, the supervisor's own too."""
    for log in sorted(paths.logs.glob("*.log")):
        await asyncio.to_thread(rotate, log, config.logs.max_size, config.logs.keep)
