"""One fleet as a client sees it: the same verbs over a supervisor's socket or straight to servers.

async with connect(ref) as fleet:
    outcomes = await fleet.pause("keep", clear_cache=False)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from skyctl.operations.attached import AttachedFleet
from skyctl.operations.supervised import SupervisedFleet

if TYPE_CHECKING:
    from skyctl.fleet.registry import FleetRef

Fleet = SupervisedFleet | AttachedFleet


@asynccontextmanager
async def connect(ref: FleetRef) -> AsyncIterator[Fleet]:
    """The running fleet of `ref`; connections are closed when the block ends.

    Raises:
        FleetDownError: skyctl should have started this fleet and it is not running.
    """
    fleet: Fleet = AttachedFleet(ref) if ref.config.attached else SupervisedFleet(ref)
    async with fleet:
        yield fleet
