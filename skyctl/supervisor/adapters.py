"""LoRA adapters of a supervised fleet: changed on all servers, and loaded into each that starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.adapters import change, committed, given
from skyctl.adapters.fleet import AdapterChange, AdapterFleet
from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.core.arbiter import Act
from skyctl.core.plan import FleetPlan
from skyctl.errors import SkyctlError, UsageError
from skyctl.fleetfile.values import resolve_relative
from skyctl.http.target import ServerTarget
from skyctl.states import Phase
from skyctl.store import adapters as store
from skyctl.supervisor.fleet import RunningFleet

if TYPE_CHECKING:
    from skyctl.supervisor.replica import Replica


async def change_all(running: RunningFleet, request: LoadAdapter | UnloadAdapter) -> AdapterChange:
    """Load or unload on every server, in a turn."""
    fleet = _fleet(running, running.require_plan())
    servers = running.urls_of(running.replicas.values())
    activity = f"skyctl adapters, {request.name}"
    with await running.arbiter.turn(Act.VERB, activity, servers=servers):
        return await change.change_all(fleet, request)


async def take_initial(running: RunningFleet, plan: FleetPlan) -> None:
    """Record the fleet file's adapters that were not loaded or changed yet: servers that start load
    them before they are routed to, those that are up load them now. Files lost in a reboot are
    copied again, if their source is still there.

    Raises:
        SkyctlError: an adapter is not what it was when the plan was checked.
    """
    if plan.config.lora is None:
        store.forget(running.state)  # starting servers would wait for what they cannot load
        return
    fleet = _fleet(running, plan)
    for adapter in store.served(running.state).values():
        if not await asyncio.to_thread(Path(adapter.path).exists):
            try:
                await change.restore(fleet, adapter)
            except SkyctlError as error:
                running.state.add_event("adapters", f"{adapter.served_as} is lost: {error.message}")
    for name, path in plan.config.lora.adapters.items():
        if name not in store.served(running.state):
            directory = resolve_relative(path, plan.base_dir)
            await change.enter(fleet, LoadAdapter(name=name, directory=directory))
    behind = [r for r in _able(running) if not store.is_current(running.state, r.name)]
    for replica in behind:
        await admit(running, replica)


async def admit(running: RunningFleet, replica: Replica) -> None:
    """Bring a server to the fleet's adapters; quarantine it if that fails."""
    plan = running.require_plan()
    if plan.config.lora is None:
        return
    fleet = _fleet(running, plan)
    try:
        await given.keep(fleet)  # this server may need what only others hold
        async with change.changing(fleet):
            outcomes = await committed.catch_up(
                running.state, running.client, [replica.target], fleet.timeout_s
            )
        reason = "" if outcomes[0].ok else outcomes[0].detail
    except SkyctlError as error:
        reason = error.message
    if reason:
        hint = f"skyctl restart {replica.name}"
        replica.update_row(quarantine=f"not given the fleet's adapters: {reason}; type: {hint}")


def is_current(running: RunningFleet, replica: Replica) -> bool:
    """Whether a server has the fleet's adapters, and no change is under way that it would miss."""
    state = running.state
    return store.is_current(state, replica.name) and not store.unfinished(state)


async def keep_house(running: RunningFleet) -> None:
    """Write versions that only servers hold, and remove the files of those that none uses."""
    if running.plan is not None and running.plan.config.lora is not None:
        fleet = _fleet(running, running.plan)
        await given.keep(fleet)
        await committed.retire(fleet)


def _able(running: RunningFleet) -> list[Replica]:
    """Replicas that can load an adapter now. A sleeping one loads it when it wakes."""
    return [
        replica
        for replica in running.replicas.values()
        if replica.phase is Phase.UP and not replica.row.quarantine and not replica.row.sleep_level
    ]


def _fleet(running: RunningFleet, plan: FleetPlan) -> AdapterFleet:
    lora = plan.config.lora
    if lora is None:
        raise UsageError(
            f"the servers of fleet {plan.name} take no adapters",
            hint="write a section into the fleet file (`lora: {}` will do), then: skyctl up",
        )

    def targets() -> tuple[Sequence[ServerTarget], Mapping[str, str]]:
        able = _able(running)
        absent = {
            name: f"{replica.state}; it takes the fleet's adapters before it is routed"
            for name, replica in running.replicas.items()
            if replica not in able
        }
        return [replica.target for replica in able], absent

    pushed = running.state.weights().checkpoint
    bases = (plan.config.model, plan.model_path, plan.served_model_name, pushed)
    return AdapterFleet(
        name=plan.name,
        state=running.state,
        client=running.client,
        targets=targets,
        directory=running.paths.adapters,
        locks=running.server_locks,
        in_memory=running.paths.shared is None,
        timeout_s=plan.config.control_timeout_s,
        model=plan.base,
        bases=[base for base in bases if base],
        reserved=(plan.served_model_name,),
        max_rank=lora.max_rank,
        max_adapters=lora.max_adapters,
        quarantined=lambda server: running.replicas[server].reload_row(),
    )
