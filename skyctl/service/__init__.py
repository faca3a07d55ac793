"""A fleet as its users see it: `connect()` returns a FleetService, whatever runs the fleet."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from skyctl.core.service import FleetService

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef, RemoteRef

__all__ = ["FleetService", "connect"]


def connect(ref: FleetRef | RemoteRef) -> AbstractAsyncContextManager[FleetService]:
    """The fleet of `ref`; connections are closed when the block ends.

    async with connect(ref) as fleet:
        outcomes = await fleet.pause(Pause(mode="keep"))

    Raises:
        ConflictError: the fleet runs, or is attached, from another file of its name.
    """
    # only the one that is needed is imported: `status` must be fast
    from skyctl.core.registry import RemoteRef, refuse_another_file

    if isinstance(ref, RemoteRef):
        from skyctl.supervisor.client import NetworkFleet

        return NetworkFleet(ref)
    refuse_another_file(ref)
    if ref.attached:
        from skyctl.service.attached import AttachedFleet

        return AttachedFleet(ref)
    from skyctl.service.supervised import SupervisedFleet

    return SupervisedFleet(ref)
