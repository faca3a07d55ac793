"""Status of a fleet that skyctl did not start: ask every server and the router now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

from skyctl import engines
from skyctl.core.status import FleetStatus, ReplicaStatus, RouterStatus, assess
from skyctl.engines.base import ServerMetrics
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.store.adapters import served
from skyctl.store.state import FleetState, ServerRow

ASK_TIMEOUT_S = 5.0


async def attached_status(
    client: ControlClient,
    name: str,
    targets: Sequence[ServerTarget],
    router_url: str | None,
    state: FleetState,
    *,
    engine: str,
) -> FleetStatus:
    """One row per server, in order; a server that does not answer is `unreachable`."""
    workers = await _workers(client, engine, router_url)
    rows = {row.name: row for row in state.servers()}
    replicas = tuple(
        await asyncio.gather(
            *(_server(client, t, rows.get(t.name, ServerRow(t.name)), workers) for t in targets)
        )
    )
    router = None
    if router_url is not None:
        up = isinstance(workers, frozenset)
        router = RouterStatus(
            state="ready" if up else "unreachable",
            url=router_url,
            reason="" if up else str(workers),
            port=urlsplit(router_url).port,
            workers=len(workers) if isinstance(workers, frozenset) else None,
        )
    health, reasons = assess(replicas, router)
    return FleetStatus(
        name,
        health,
        replicas,
        router,
        reasons,
        weight_version=state.weights().version,
        adapters=tuple(one.served_as for one in served(state).values()),
    )


async def _workers(
    client: ControlClient, engine: str, url: str | None
) -> frozenset[str] | str | None:
    """The router's workers, or why they are not known; None without a router."""
    if url is None:
        return None
    try:
        router = engines.router(client, engine, url, timeout_s=ASK_TIMEOUT_S)
        return frozenset(await router.workers())
    except SkyctlError as error:
        return error.message


async def _server(
    client: ControlClient,
    target: ServerTarget,
    row: ServerRow,
    workers: frozenset[str] | str | None,
) -> ReplicaStatus:
    server = engines.server(client, target, timeout_s=ASK_TIMEOUT_S)
    paused, metrics, version = await asyncio.gather(
        server.is_paused(), server.metrics(), server.weight_version(), return_exceptions=True
    )
    reason = ""
    if isinstance(paused, BaseException):
        state, reason = "unreachable", str(paused).removeprefix(f"{target.name}: ")
    elif row.quarantine:
        state, reason = "quarantined", row.quarantine
    elif row.sleep_level or (isinstance(metrics, ServerMetrics) and metrics.sleep_level):
        state = "asleep"
    else:
        state = "paused" if paused else "ready"
    label = version if isinstance(version, str) else None
    load = metrics if isinstance(metrics, ServerMetrics) else None
    return ReplicaStatus(
        name=target.name,
        state=state,
        url=target.url,
        reason=reason,
        routed=target.url in workers if isinstance(workers, frozenset) else None,
        port=urlsplit(target.url).port,
        **(load.load() if load else {}),
        # a fleet that nothing was pushed into from here has its weights from somebody else
        weight_version=row.weight_version or label,
        reported_version=label,
    )
