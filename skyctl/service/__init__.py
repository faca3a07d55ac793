"""A fleet as its users see it: `connect()` returns a FleetService, whatever runs the fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from skyctl.core.service import FleetService

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef, RemoteRef
    from skyctl.service.attached import AttachedFleet
    from skyctl.service.supervised import SupervisedFleet
    from skyctl.supervisor.client import NetworkFleet

__all__ = ["FleetService", "connect"]


@asynccontextmanager
async def connect(ref: FleetRef | RemoteRef) -> AsyncIterator[FleetService]:
    """The fleet of `ref`; connections are closed when the block ends.

    async with connect(ref) as fleet:
        outcomes = await fleet.pause(Pause(mode="keep"))
    """
    # only the one that is needed is imported: `status` must be fast
    from skyctl.core.registry import RemoteRef

    fleet: NetworkFleet | AttachedFleet | SupervisedFleet
    if isinstance(ref, RemoteRef):
        from skyctl.supervisor.client import NetworkFleet

        fleet = NetworkFleet(ref)
    elif ref.attached:
        from skyctl.service.attached import AttachedFleet

        fleet = AttachedFleet(ref)
    else:
        from skyctl.service.supervised import SupervisedFleet

        fleet = SupervisedFleet(ref)
    async with fleet as connected:
        yield connected
