"""The section `on_event:` of a fleet file: commands that the supervisor runs."""

from __future__ import annotations

from pydantic import Field

from skyctl.fleetfile.sections import Section
from skyctl.states import FleetEvent


class EventSection(Section):
    """A shell command for each event; it gets the event as JSON on its standard input."""

    push_succeeded: str | None = Field(None, description="All servers run a push's version.")
    push_failed: str | None = Field(None, description="A push was refused, failed or undone.")
    replica_ready: str | None = Field(None, description="A server is up, at the fleet's weights.")
    process_died: str | None = Field(
        None, description="A server, the router or the Tinker API died, or did not come up."
    )
    replica_replaced: str | None = Field(
        None, description="Recovery starts a server again whose state was wrong."
    )
    operation_done: str | None = Field(
        None, description="`up`, `restart`, `scale` or a recovery has ended."
    )
    operation_failed: str | None = Field(None, description="One of them failed, or was stopped.")

    def command(self, event: FleetEvent) -> str:
        """The command for an event; "" for none."""
        return str(getattr(self, event) or "")
