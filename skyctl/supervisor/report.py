"""The fleet as its supervisor sees it now, as a FleetStatus."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from skyctl import engines
from skyctl.core.status import (
    INTENDED_STATES,
    FleetStatus,
    FrontStatus,
    Reason,
    ReplicaStatus,
    RouterStatus,
    assess,
)
from skyctl.engines.base import ServerMetrics
from skyctl.engines.logs import latest_message, tail
from skyctl.errors import SkyctlError
from skyctl.store.adapters import served
from skyctl.supervisor.admission import refresh_all
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.front import Front
from skyctl.supervisor.replica import Replica

ASK_TIMEOUT_S = 2.0
_LOG_LINES = 20  # a message of vLLM's may span this many


async def report(running: RunningFleet, *, fresh: bool = True) -> FleetStatus:
    """Ask all servers that are up at once, for at most `ASK_TIMEOUT_S` seconds.

    Unless `fresh`, a pause that somebody else made shows only with the next health probe.
    """
    replicas = list(running.replicas.values())
    up = [replica for replica in replicas if replica.phase == "up"]
    looked_at = [replica for replica in up if fresh and not replica.update_state]
    metrics, versions, failed = await asyncio.gather(
        asyncio.gather(*(_load(running, replica) for replica in replicas)),
        asyncio.gather(*(_version(running, r, ask=r in looked_at) for r in replicas)),
        refresh_all(looked_at, running.client, ASK_TIMEOUT_S),
    )
    rows = tuple(
        _replica_row(running, replica, found, version, failed.get(replica.name, ""))
        for replica, found, version in zip(replicas, metrics, versions, strict=True)
    )
    router, tinker = _router_row(running), _tinker_row(running)
    rollout = _rollout(running)
    health, reasons = assess(rows, router, tinker, rolling=rollout is not None)
    if (lost := running.state.unrecorded) is not None:
        reasons += (Reason(f"{lost.path} cannot be written: {lost.why}", lost.hint),)
    if running.not_listening:
        reasons += (Reason(running.not_listening, "put it right, then: skyctl up"),)
    return FleetStatus(
        name=running.paths.name,
        health=health,
        replicas=rows,
        router=router,
        reasons=reasons,
        supervised=True,
        supervisor_pid=os.getpid(),
        device=running.plan.device if running.plan else None,
        model=running.plan.served_model_name if running.plan else None,
        weight_version=running.state.weights().version,
        operation=running.operation,
        job=running.push_job.id if running.push_job else None,
        rollout=rollout,
        adapters=tuple(one.served_as for one in served(running.state).values()),
        tinker=tinker,
    )


def _rollout(running: RunningFleet) -> str | None:
    """`push-7: 1 of 3 servers updated` while a push rolls."""
    job = running.push_job
    if job is None or not job.request.get("rolling"):
        return None
    told = running.state.journal.job(job.id).servers
    done = sum(server["state"] in ("ready", "kept") for server in told.values())
    return f"{job.id}: {done} of {len(running.replicas)} servers updated"


async def _load(running: RunningFleet, replica: Replica) -> ServerMetrics | None:
    if replica.phase != "up":
        return None
    try:
        return await engines.server(
            running.client, replica.target, timeout_s=ASK_TIMEOUT_S
        ).metrics()
    except SkyctlError:
        return None


async def _version(running: RunningFleet, replica: Replica, *, ask: bool) -> str | None:
    """The label that a server carries, None if it reports none or is not to be asked."""
    if not ask:
        return None
    server = engines.server(running.client, replica.target, timeout_s=ASK_TIMEOUT_S)
    try:
        return await server.weight_version()
    except SkyctlError:
        return None


def _replica_row(
    running: RunningFleet,
    replica: Replica,
    metrics: ServerMetrics | None,
    version: str | None,
    failed: str,
) -> ReplicaStatus:
    router = running.router
    starting = replica.phase in ("waiting", "starting")
    lines = tail(running.paths.log(replica.name), _LOG_LINES) if starting else []
    state, reason = replica.state, replica.row.quarantine or replica.reason
    if failed and state in INTENDED_STATES:
        state, reason = "unreachable", failed  # the probes have not counted enough failures yet
    if replica.phase == "waiting":
        reason = "waits for its GPU"
    elif replica.phase == "starting" and not replica.spec.port:
        reason = "waits for a node"
    return ReplicaStatus(
        name=replica.name,
        state=state,
        url=replica.spec.url,
        reason=reason,
        routed=None if router is None else replica.spec.url in router.workers,
        pid=replica.process.pid if replica.process else None,
        port=replica.spec.port,
        gpus=replica.spec.gpus,
        node=replica.spec.machines,
        role=replica.spec.role,
        **(metrics.load() if metrics else {}),
        weight_version=replica.row.weight_version,
        reported_version=version,
        uptime_s=_since(replica.started_at),
        state_s=_since(replica.state_since),
        rss_bytes=replica.process.resident_bytes() if replica.process else None,
        restarts=len(replica.restarts),
        restart_reason=replica.restart_reason,
        log_line=latest_message(lines),
    )


def _router_row(running: RunningFleet) -> RouterStatus | None:
    router = running.router
    if router is None:
        return None
    return RouterStatus(
        **_front_row(router),
        metrics_port=router.spec.metrics_port,
        workers=len(router.workers),
    )


def _tinker_row(running: RunningFleet) -> FrontStatus | None:
    tinker = running.tinker
    return None if tinker is None else FrontStatus(**_front_row(tinker))


def _front_row(front: Front) -> dict[str, Any]:
    waits = front.state == "waiting"
    return {
        "state": "starting" if waits else front.state,
        "url": front.spec.url,
        "reason": "waits for a server" if waits else front.reason,
        "pid": front.process.pid if front.process else None,
        "port": front.spec.port,
        "uptime_s": _since(front.started_at),
        "rss_bytes": front.process.resident_bytes() if front.process else None,
        "restarts": len(front.restarts),
        "restart_reason": front.restart_reason,
    }


def _since(started_at: float | None) -> float | None:
    return None if started_at is None else max(0.0, time.time() - started_at)
