"""What up, restart and scale share: follow an operation, and report how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.core.status import FleetStatus
    from skyctl.service import FleetService


async def follow(
    fleet: FleetService, operation: int, title: str, *, timeout_s: float | None = None
) -> FleetStatus:
    """Draw an operation's progress until it has ended; the last status.

    Raises:
        SkyctlError: it failed. DeadlineExceeded: it goes on after `timeout_s` seconds.
    """
    from skyctl import output
    from skyctl.cli.fleet_view import OperationView
    from skyctl.service.bring_up import follow_operation
    from skyctl.service.ended import operation_error

    view = OperationView(title)
    with output.live(view.render, transient=True) as live:
        view.drawing = live.drawing
        status = await follow_operation(fleet, operation, view.see, timeout_s=timeout_s)
    error = await operation_error(fleet, status)
    if error is not None:
        if not output.mode.json:
            _show_logs(error.details["logs"])
        raise error
    return status


def _show_logs(logs: dict[str, list[str]]) -> None:
    """The last lines of what failed, with the line that says why set off."""
    from skyctl import output
    from skyctl.cli.fleet_view import log_tail
    from skyctl.engines.logs import telling_line

    for name, lines in logs.items():
        if lines:
            output.err.print(log_tail(name, lines, telling_line(lines)))
