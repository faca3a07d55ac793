"""All fleets of this user, as their supervisors and their records show them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from skyctl.core.registry import known_fleets, origin_of, supervisor_running, was_attached
from skyctl.core.requests import StatusQuery
from skyctl.core.status import Health
from skyctl.errors import SkyctlError, VersionMismatch
from skyctl.service.unsupervised import left_alone
from skyctl.store.paths import FleetPaths, fleet_paths
from skyctl.supervisor.interface import SupervisorClient

_ANSWER_S = 2.0


class Listed(StrEnum):
    """What a fleet is without an answer of its supervisor."""

    ATTACHED = "attached"
    """skyctl did not start its servers; they are not asked."""
    ALONE = "no supervisor"
    """Its servers run on; the next command starts another supervisor."""
    SILENT = "not answering"
    """Its supervisor does not answer."""
    OTHER_VERSION = "other skyctl"
    """Its supervisor is of another version."""


@dataclass(frozen=True)
class FleetLine:
    """One fleet. None: not known."""

    name: str
    """Its name."""
    state: Health | Listed
    """Its health, if its supervisor answers."""
    file: str | None = None
    """The user's fleet file."""
    servers: int | None = None
    """How many it has."""
    weight_version: str | None = None
    """Of its last push."""
    supervisor_pid: int | None = None
    """Of its supervisor."""
    sleep_group: str | None = None
    """Of the fleets that share its GPUs, if its supervisor answers."""


async def list_fleets() -> list[FleetLine]:
    """Every fleet that this user has started or attached to; only supervisors here are asked."""
    return list(await asyncio.gather(*(_line(fleet_paths(name)) for name in known_fleets())))


async def _line(paths: FleetPaths) -> FleetLine:
    file = origin_of(paths).get("file")
    if was_attached(paths):
        return FleetLine(paths.name, Listed.ATTACHED, file)
    if not supervisor_running(paths):
        alone = await asyncio.to_thread(left_alone, paths)
        return FleetLine(paths.name, Listed.ALONE if alone else Health.DOWN, file)
    try:
        async with asyncio.timeout(_ANSWER_S), SupervisorClient.on_this_machine(paths) as client:
            status = await client.status(StatusQuery(fresh=False))
    except VersionMismatch:
        return FleetLine(paths.name, Listed.OTHER_VERSION, file)
    except (SkyctlError, TimeoutError):
        return FleetLine(paths.name, Listed.SILENT, file)
    return FleetLine(
        paths.name,
        status.health,
        file,
        len(status.replicas),
        status.weight_version,
        status.supervisor_pid,
        status.sleep_group.name if status.sleep_group else None,
    )
