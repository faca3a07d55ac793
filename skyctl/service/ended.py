"""The error that an ended operation is raised as, if any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyctl.core.requests import LogQuery
from skyctl.core.service import FleetService
from skyctl.errors import ConflictError, SkyctlError
from skyctl.states import ReplicaState
from skyctl.units import count_of

if TYPE_CHECKING:
    from skyctl.core.status import FleetStatus

LOG_LINES = 20


async def operation_error(fleet: FleetService, status: FleetStatus) -> SkyctlError | None:
    """The error of an operation that failed, or whose fleet has to sleep by now; None if it
    succeeded.

    `details` has the status, and under `logs` the last lines of each server that failed.
    """
    from skyctl.core.status import ENDED_BY_OTHERS, ended_by_others
    from skyctl.engines.logs import this_run

    if status.operation is None:
        return None
    group = status.sleep_group
    if not status.operation.error and group is not None and group.awake != status.name:
        return ConflictError(
            f"fleet {status.name} has started, and sleeps: {group.awake or 'no fleet'} is awake in "
            f"sleep_group {group.name}",
            hint=f"skyctl switch {status.name}",
        )
    if not status.operation.error:
        return None
    if status.operation.error in ENDED_BY_OTHERS:
        return ended_by_others(status.operation.kind, status.operation.error)
    failing = [r for r in status.replicas if r.state.stuck]
    names = [replica.name for replica in failing]
    names += [name for name, front in status.fronts.items() if front.state.given_up]
    running = sum(replica.state is ReplicaState.READY for replica in status.replicas)
    replicas = count_of(len(status.replicas), "replica")
    kept = f"{running} of {replicas} still running; " if running else ""
    logs = await fleet.logs(LogQuery(lines=LOG_LINES)) if names else {}
    shown = {name: this_run(logs.get(name, ())) for name in names}
    shown |= {name: list(lines) for name, lines in status.operation.logs.items()}
    first = next(iter(shown), "supervisor")
    again = f"read: skyctl logs {first}; try again: skyctl up; or end it: skyctl down"
    if status.operation.logs and not names:  # all have their old settings again
        again = "correct the fleet file, then: skyctl up"
    return SkyctlError(
        f"{status.operation.kind} failed: {status.operation.error}",
        hint=f"{kept}{again}",
        details={"status": status.to_json(), "logs": shown},
    )
