"""All fleets of this user, as their supervisors and their records show them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from enum import StrEnum

from skyctl.core.registry import (
    RemoteRef,
    known_fleets,
    left_alone,
    origin_of,
    supervisor_running,
    was_attached,
)
from skyctl.core.requests import StatusQuery
from skyctl.core.service import FleetService
from skyctl.core.status import Health
from skyctl.errors import SkyctlError, VersionMismatch
from skyctl.service import connect
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
    UNREADABLE = "unreadable"
    """It has no supervisor, and its state file cannot be used here."""


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
    url: str | None = None
    """At which its supervisor listens, if that is on another machine."""
    reason: str | None = None
    """Why its supervisor does not answer, or its state cannot be read."""


async def list_fleets(elsewhere: RemoteRef | None = None) -> list[FleetLine]:
    """Every fleet that this user has started or attached to here, and one of another machine; only
    supervisors are asked.
    """
    lines = [_line(fleet_paths(name)) for name in known_fleets()]
    if elsewhere is not None:
        lines.append(_line_elsewhere(elsewhere))
    return list(await asyncio.gather(*lines))


async def _line(paths: FleetPaths) -> FleetLine:
    file = origin_of(paths).get("file")
    if was_attached(paths):
        return FleetLine(paths.name, Listed.ATTACHED, file)
    if not supervisor_running(paths):
        try:
            alone = await asyncio.to_thread(left_alone, paths)
        except SkyctlError as error:
            return FleetLine(paths.name, Listed.UNREADABLE, file, reason=error.message)
        return FleetLine(paths.name, Listed.ALONE if alone else Health.DOWN, file)
    fleet = SupervisorClient.on_this_machine(paths)
    return replace(await _answered(paths.name, fleet), file=file)


async def _line_elsewhere(ref: RemoteRef) -> FleetLine:
    return replace(await _answered(ref.name, connect(ref)), url=ref.url)


async def _answered(name: str, fleet: AbstractAsyncContextManager[FleetService]) -> FleetLine:
    """The line of a fleet whose supervisor is asked; without an answer, under this name."""
    try:
        async with asyncio.timeout(_ANSWER_S), fleet as connected:
            status = await connected.status(StatusQuery(fresh=False))
    except VersionMismatch as error:
        return FleetLine(name, Listed.OTHER_VERSION, reason=error.message)
    except SkyctlError as error:
        return FleetLine(name, Listed.SILENT, reason=error.message)
    except TimeoutError:
        return FleetLine(name, Listed.SILENT, reason=f"no answer in {_ANSWER_S:g} s")
    return FleetLine(
        status.name,
        status.health,
        servers=len(status.replicas),
        weight_version=status.weight_version,
        supervisor_pid=status.supervisor_pid,
        sleep_group=status.sleep_group.name if status.sleep_group else None,
    )
