"""A fleet as its users see it: `connect()` returns a FleetService, whatever runs the fleet."""

from skyctl.core.service import FleetService
from skyctl.service.connect import connect

__all__ = ["FleetService", "connect"]
