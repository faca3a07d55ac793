"""A fleet as its users see it: `connect()` gives a FleetService, whoever runs the fleet."""

from skyctl.core.service import FleetService
from skyctl.service.connect import connect

__all__ = ["FleetService", "connect"]
