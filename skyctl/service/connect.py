"""One fleet as a client sees it: the same verbs over a supervisor's socket or straight to servers.

async with connect(ref) as fleet:
    outcomes = await fleet.pause("keep", clear_cache=False)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.service.attached import AttachedFleet
    from skyctl.service.supervised import SupervisedFleet

    Fleet: TypeAlias = SupervisedFleet | AttachedFleet


@asynccontextmanager
async def connect(ref: FleetRef) -> AsyncIterator[Fleet]:
    """The fleet of `ref`; connections are closed when the block ends.

    Verbs of a fleet that skyctl should have started, and that is not running, raise
    FleetDownError; its status, jobs and history can be read all the same.
    """
    # only the one that is needed is imported: `status` must be fast
    if ref.config.attached:
        from skyctl.service.attached import AttachedFleet

        async with AttachedFleet(ref) as attached:
            yield attached
    else:
        from skyctl.service.supervised import SupervisedFleet

        async with SupervisedFleet(ref) as supervised:
            yield supervised
