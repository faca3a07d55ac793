"""What up, restart and scale share: follow an operation, and say how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.errors import SkyctlError
    from skyctl.fleet.paths import FleetPaths
    from skyctl.fleet.status import FleetStatus


async def follow(
    paths: FleetPaths, operation: int, title: str, *, timeout_s: float | None = None
) -> FleetStatus:
    """Draw an operation's progress until it has ended; the last status.

    Raises:
        SkyctlError: it failed. DeadlineExceeded: it goes on after `timeout_s` seconds.
    """
    from skyctl import output
    from skyctl.cli.fleet_view import OperationView
    from skyctl.operations.bring_up import follow_operation

    view = OperationView(title)
    with output.live(view.render, transient=True) as live:
        view.drawing = live.drawing
        status = await follow_operation(paths, operation, view.see, timeout_s=timeout_s)
    if status.operation is not None and status.operation.error:
        raise failure(paths, status, show=not output.mode.json)
    return status


def failure(paths: FleetPaths, status: FleetStatus, *, show: bool) -> SkyctlError:
    """The error of an operation that failed; with `show`, the failing servers' logs come first."""
    from skyctl import output
    from skyctl.cli.fleet_view import log_tail
    from skyctl.errors import SkyctlError
    from skyctl.supervisor.logtail import tail, telling_line

    assert status.operation is not None  # it is what failed
    failing = [r for r in status.replicas if r.state in ("failed", "dead", "quarantined")]
    names = [replica.name for replica in failing]
    if status.router is not None and status.router.state in ("failed", "dead"):
        names.append("router")
    logs = {}
    for name in names:
        lines = tail(paths.log(name), 20)
        logs[name] = lines
        if show and lines:
            output.err.print(log_tail(name, lines, telling_line(tail(paths.log(name), 200))))
    running = sum(replica.state == "ready" for replica in status.replicas)
    kept = f"{running} of {len(status.replicas)} replicas run on; " if running else ""
    first = names[0] if names else "supervisor"
    return SkyctlError(
        f"{status.operation.kind} failed: {status.operation.error}",
        hint=f"{kept}read: skyctl logs {first}; try again: skyctl up; or end it: skyctl down",
        details={"status": status.to_json(), "logs": logs},
    )
