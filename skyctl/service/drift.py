"""How far a running fleet is from its fleet file and from its intended state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from skyctl.core.diagnosis import drift, from_intent, from_routing, from_weights
from skyctl.core.findings import Condition, Finding
from skyctl.core.registry import FleetRef, RemoteRef
from skyctl.core.results import Processes
from skyctl.core.service import FleetService
from skyctl.core.status import FleetStatus, Health

if TYPE_CHECKING:
    from skyctl.supervisor.reconcile import Changes


async def find_drift(
    ref: FleetRef | RemoteRef, fleet: FleetService, status: FleetStatus
) -> list[Finding]:
    """All differences of a fleet with this status; [] for a fleet that is down: nothing runs. The
    file of another machine's fleet is not here, so nothing is compared with it.

    Raises:
        UsageError: the fleet file cannot be planned here (its API key is not set, …).
    """
    if status.health == Health.DOWN:
        return []
    servers = (await fleet.weights()).servers
    changes = None
    if isinstance(ref, FleetRef) and not ref.config.attached:
        changes = await asyncio.to_thread(_changes, ref, await fleet.processes(), status)
    return [
        *from_file(changes),
        *from_intent(status.replicas, servers),
        *from_weights(status),
        *from_routing(status),
    ]


def from_file(changes: Changes | None) -> list[Finding]:
    """What `skyctl up` would change; nothing for an attached fleet (None)."""
    if changes is None:
        return []
    up = "make it what the file says: skyctl up"
    fronts = [name for name in ("router", "tinker") if getattr(changes, name)]
    return [
        drift(name, detail, up, Condition.OTHER_SETTINGS)
        for names, detail in (
            (changes.start, "is in the fleet file and does not run"),
            (changes.restart, "runs with other settings than the file's"),
            (changes.stop, "runs and is not in the fleet file"),
            (fronts, "is not what the fleet file says"),
        )
        for name in names
    ]


def _changes(ref: FleetRef, processes: Processes, status: FleetStatus) -> Changes:
    """What `skyctl up` would do, from the hashes recorded at each spawn."""
    from skyctl.core.planning import at_present, planned
    from skyctl.supervisor.reconcile import compare

    given_up = {r.name for r in status.replicas if r.state.ended}
    asleep = status.scaling.asleep if status.scaling else ()  # outside the fleet
    running = {
        row.name: None if row.name in given_up else row.spec_hash
        for row in processes.rows
        if row.role == "server" and row.name not in asleep
    }
    fronts = {row.role: row.spec_hash for row in processes.rows if row.role != "server"}
    # `up --no-router` was deliberate, not drift
    config = at_present(ref.config, processes.ports)
    ports, pins, router = processes.ports, processes.pins, "router" in fronts
    plan = planned(config, ref.base_dir, ports, pins=pins, router=router)
    return compare(plan, running, fronts.get("router"), fronts.get("tinker"))
