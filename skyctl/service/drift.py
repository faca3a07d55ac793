"""How far a running fleet is from its fleet file and from its intended state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from skyctl.core.registry import FleetRef, RemoteRef
from skyctl.core.results import Processes
from skyctl.core.service import FleetService
from skyctl.core.status import FleetStatus, Health, ReplicaStatus
from skyctl.states import ReplicaState
from skyctl.store.state import ServerRow

if TYPE_CHECKING:
    from skyctl.supervisor.reconcile import Changes


@dataclass(frozen=True)
class Drift:
    """One difference. `subject` is a replica, a front or `fleet`; `hint` is what ends it."""

    subject: str
    message: str
    hint: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


async def find_drift(
    ref: FleetRef | RemoteRef, fleet: FleetService, status: FleetStatus
) -> list[Drift]:
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


def from_file(changes: Changes | None) -> list[Drift]:
    """What `skyctl up` would change; nothing for an attached fleet (None)."""
    if changes is None:
        return []
    up = "make it what the file says: skyctl up"
    fronts = [name for name in ("router", "tinker") if getattr(changes, name)]
    return [
        Drift(name, message, up)
        for names, message in (
            (changes.start, "is in the fleet file and does not run"),
            (changes.restart, "runs with other settings than the file's"),
            (changes.stop, "runs and is not in the fleet file"),
            (fronts, "is not what the fleet file says"),
        )
        for name in names
    ]


def from_intent(replicas: Sequence[ReplicaStatus], rows: Iterable[ServerRow]) -> list[Drift]:
    """Servers that something other than skyctl paused, resumed or put to sleep."""
    intended = {row.name: row.intended for row in rows}
    drifts = []
    for replica in replicas:
        intent = intended.get(replica.name, "running")
        if replica.state is ReplicaState.READY and intent == "paused":
            drifts.append(Drift(replica.name, "is meant to be paused and runs", "skyctl pause"))
        elif replica.state is ReplicaState.PAUSED and intent == "running":
            drifts.append(Drift(replica.name, "is meant to run and is paused", "skyctl resume"))
        elif intent == "asleep" and replica.state in (ReplicaState.READY, ReplicaState.PAUSED):
            drifts.append(Drift(replica.name, "is meant to sleep and is awake", "skyctl sleep"))
        elif intent != "asleep" and replica.state is ReplicaState.ASLEEP:
            drifts.append(Drift(replica.name, "is meant to be awake and sleeps", "skyctl wake"))
        elif not replica.state.as_intended:
            hint = "skyctl recover" if replica.state.recoverable else f"skyctl logs {replica.name}"
            drifts.append(Drift(replica.name, f"is meant to run and is {replica.state}", hint))
    return drifts


def from_weights(status: FleetStatus) -> list[Drift]:
    """Servers at a weight version other than the fleet's."""
    version = status.weight_version
    if version is None:
        return []
    return [
        Drift(
            replica.name,
            f"has weights {replica.weight_version or 'base'}, the fleet {version}",
            "push again: skyctl sync-weights CKPT",
        )
        for replica in status.replicas
        if replica.state.as_intended and replica.weight_version != version
    ]


def from_routing(status: FleetStatus) -> list[Drift]:
    """Ready servers missing from the router, and servers it must not send requests to."""
    drifts = []
    attached = status.supervised is None
    for replica in status.replicas:
        if replica.routed is False and replica.state is ReplicaState.READY:
            hint = "wait a moment, then: skyctl logs router"
            hint = f"add {replica.url} to the router" if attached else hint
            drifts.append(Drift(replica.name, "is ready and not routed", hint))
        elif replica.routed and replica.state.fails_requests:
            hint = f"requests sent there fail: skyctl restart {replica.name}"
            hint = f"take {replica.url} out of the router" if attached else hint
            drifts.append(Drift(replica.name, f"is {replica.state} and still routed", hint))
    return drifts


def _changes(ref: FleetRef, processes: Processes, status: FleetStatus) -> Changes:
    """What `skyctl up` would do, from the hashes recorded at each spawn."""
    from skyctl.core.planning import planned
    from skyctl.supervisor.reconcile import compare

    given_up = {r.name for r in status.replicas if r.state.ended}
    running = {
        row.name: None if row.name in given_up else row.spec_hash
        for row in processes.rows
        if row.role == "server"
    }
    fronts = {row.role: row.spec_hash for row in processes.rows if row.role != "server"}
    # `up --no-router` was deliberate, not drift
    plan = planned(ref.config, ref.base_dir, processes.ports, router="router" in fronts)
    return compare(plan, running, fronts.get("router"), fronts.get("tinker"))
