"""Status of a started fleet whose supervisor does not answer: from its state file alone."""

from __future__ import annotations

import time

from skyctl.core.plan import local_url
from skyctl.core.status import FleetStatus, Reason, ReplicaStatus, RouterStatus
from skyctl.store.identity import ProcessIdentity, boot_id
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState, ProcessRow
from skyctl.supervisor.restarts import remembered


def unsupervised_status(paths: FleetPaths, *, why: str = "") -> FleetStatus:
    """What is left of a fleet: servers that run on without a supervisor, or nothing.

    `why` no supervisor could take its place, if that was tried.
    """
    if not paths.database.exists():
        return FleetStatus(paths.name, "down", (), None, supervised=False)
    with FleetState(paths.database) as state:
        processes = state.processes()
        versions = {row.name: row.weight_version for row in state.servers()}
        version = state.weights().version
        going_down = bool(state.get("going_down"))
        restarts = {row.name: remembered(state, row.name, time.time()) for row in processes}
    replicas = tuple(
        _replica(row, versions, *restarts[row.name]) for row in processes if row.role == "server"
    )
    routers = [_router(row) for row in processes if row.role == "router"]
    left = [row.name for row in processes if _alive(row)]
    reasons: tuple[Reason, ...] = ()
    if left and going_down:
        message = f"`skyctl down` was cut short; {', '.join(left)} still run"
        reasons = (Reason(message, "finish it: skyctl down"),)
    elif left:
        message = why or f"the supervisor is gone; {', '.join(left)} run on unsupervised"
        hint = "take them over: skyctl recover; or stop them: skyctl down"
        reasons = (Reason(message, hint),)
    elif any(_stale(row) for row in processes):
        message = "the machine was restarted since this fleet ran: its state is stale"
        reasons = (Reason(message, "start it again: skyctl up"),)
    return FleetStatus(
        name=paths.name,
        health="degraded" if left else "down",
        replicas=replicas if left else (),
        router=routers[0] if left and routers else None,
        reasons=reasons,
        supervised=False,
        weight_version=version,
    )


def _replica(
    row: ProcessRow, versions: dict[str, str | None], restarts: list[float], why: str
) -> ReplicaStatus:
    identity = _alive(row)
    return ReplicaStatus(
        name=row.name,
        state="unsupervised" if identity else "stopped",
        url=local_url(row.host, row.port),
        pid=identity.pid if identity else None,
        port=row.port,
        gpus=row.gpus,
        weight_version=versions.get(row.name),
        uptime_s=time.time() - row.started_at if identity else None,
        restarts=len(restarts),
        restart_reason=why,
    )


def _router(row: ProcessRow) -> RouterStatus:
    identity = _alive(row)
    return RouterStatus(
        state="unsupervised" if identity else "stopped",
        url=local_url(row.host, row.port),
        pid=identity.pid if identity else None,
        port=row.port,
        uptime_s=time.time() - row.started_at if identity else None,
    )


def _stale(row: ProcessRow) -> bool:
    return row.identity is not None and row.identity.boot_id != boot_id()


def _alive(row: ProcessRow) -> ProcessIdentity | None:
    return row.identity if row.alive() else None
