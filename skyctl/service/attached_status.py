"""What servers and a router that skyctl did not start answer, as `status` shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from skyctl import engines
from skyctl.core.status import ReplicaStatus, RouterStatus
from skyctl.engines.base import ServerMetrics
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.states import ReplicaState
from skyctl.store.server_names import normalized
from skyctl.store.state import ServerRow

ASK_TIMEOUT_S = 5.0


async def router(
    config: FleetConfig, client: ControlClient
) -> tuple[RouterStatus | None, frozenset[str] | None]:
    """The router's status, None without one; and the URLs it routes to (`server_names.normalized`),
    None if unknown.
    """
    url = config.router
    if not isinstance(url, str):
        return None, None
    port = urlsplit(url).port
    try:
        request = engines.router(client, config.engine, url, timeout_s=ASK_TIMEOUT_S)
        urls = map(engines.routing(config.engine).worker, await request.workers())
        workers = frozenset(map(normalized, urls))
    except SkyctlError as error:
        return RouterStatus(ReplicaState.UNREACHABLE, url, error.message, port=port), None
    return RouterStatus(ReplicaState.READY, url, port=port, workers=len(workers)), workers


async def servers(
    client: ControlClient,
    targets: Sequence[ServerTarget],
    rows: Mapping[str, ServerRow],
    workers: frozenset[str] | None,
    pushing: bool,
) -> tuple[ReplicaStatus, ...]:
    """The servers as they answer now; `workers`: the URLs that the router lists, None if unknown.
    `pushing`: a push of this fleet is under way, and has paused what nobody else has.
    """
    asking = (_server(client, t, rows[t.name], workers, pushing) for t in targets)
    return tuple(await asyncio.gather(*asking))


async def _server(
    client: ControlClient,
    target: ServerTarget,
    row: ServerRow,
    workers: frozenset[str] | None,
    pushing: bool,
) -> ReplicaStatus:
    control = engines.server(client, target, timeout_s=ASK_TIMEOUT_S)
    paused, metrics, version = await asyncio.gather(
        control.is_paused(), control.metrics(), control.weight_version(), return_exceptions=True
    )
    reason = ""
    if isinstance(paused, BaseException):
        state, reason = ReplicaState.UNREACHABLE, str(paused).removeprefix(f"{target.name}: ")
    elif row.quarantine:
        state, reason = ReplicaState.QUARANTINED, row.quarantine
    elif (row.sleep_level and paused) or (  # one that sleeps is paused as well
        isinstance(metrics, ServerMetrics) and metrics.sleep_level
    ):
        state = ReplicaState.ASLEEP
    elif paused:
        state = ReplicaState.UPDATING if pushing and not row.paused else ReplicaState.PAUSED
    else:
        state = ReplicaState.READY
    label = version if isinstance(version, str) else None
    return ReplicaStatus(
        name=target.name,
        state=state,
        url=target.url,
        reason=reason,
        routed=None if workers is None else normalized(target.url) in workers,
        port=urlsplit(target.url).port,
        **(metrics.load() if isinstance(metrics, ServerMetrics) else {}),
        # before a push of skyctl, the weights come from another program
        weight_version=row.weight_version or label,
        reported_version=label,
    )
