"""Take over what a dead supervisor left: adopt what lives, start what died, put the rest right."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from skyctl.core.plan import FleetPlan
from skyctl.errors import SkyctlError
from skyctl.kill_points import reached
from skyctl.launch import HOSTS
from skyctl.store.in_doubt import in_doubt
from skyctl.store.rebuild import unrecorded_processes
from skyctl.supervisor import healing, rollout

if TYPE_CHECKING:
    from skyctl.supervisor.resident import Supervisor


async def take_over(supervisor: Supervisor, plan: FleetPlan) -> None:
    """Leave what lives as it is, even where it differs from the plan; start what died meanwhile.

    Raises:
        SkyctlError: a replica or the router was given up, or could not be put right.
    """
    reached("adopt.begin")
    await _adopt(supervisor, plan)
    specs = {spec.name: spec for spec in plan.servers}
    for name, spec in specs.items():
        if name not in supervisor.replicas:
            supervisor.new_replica(spec).start()
    supervisor.replicas = {name: supervisor.replicas[name] for name in specs}
    if plan.router is not None:
        (supervisor.router or rollout.new_router(supervisor, plan)).start()
    reached("adopt.done")
    await _heal(supervisor)
    supervisor.taken_over = True
    await asyncio.gather(*(r.settled.wait() for r in supervisor.replicas.values()))
    await rollout.settle_router(supervisor)
    rollout.raise_for_failures(supervisor)


async def adopt_and_apply(supervisor: Supervisor, plan: FleetPlan) -> None:
    """Adopt what fits a plan and make the rest so. Raises SkyctlError as `apply_plan`."""
    await _adopt(supervisor, plan)
    with contextlib.suppress(SkyctlError):  # each server says so itself
        await _heal(supervisor)
    await rollout.apply_plan(supervisor, plan)


async def _heal(supervisor: Supervisor) -> None:
    """Put right what an interrupted push left, once what was adopted answers."""
    adopted = [replica for replica in supervisor.replicas.values() if replica.adopted]
    await asyncio.gather(*(replica.settled.wait() for replica in adopted))
    if in_doubt(supervisor.state):
        await healing.heal_in_turn(supervisor)


async def _adopt(supervisor: Supervisor, plan: FleetPlan) -> None:
    """Take over what an earlier supervisor started and still runs; end what nobody wants.

    One that differs from the plan is adopted as well: to restart it is for whoever wants the plan.
    """
    host = HOSTS[plan.config.launcher]
    specs = {spec.name: spec for spec in plan.servers}
    for row in unrecorded_processes(supervisor.state, supervisor.paths.directory):
        supervisor.state.add_event(row.name, "ended a process that was not on record")
        await rollout.stop_recorded(row, host, plan.config.stop_timeout_s)
    for row in supervisor.state.processes():
        process = host.adopt(row.identity, row.token, row.descendants)
        wanted = row.name in specs or (row.role == "router" and plan.router is not None)
        if process.alive() and wanted:
            if row.role == "server":
                supervisor.new_replica(specs[row.name]).start(process)
            else:
                rollout.new_router(supervisor, plan).start(process)
            continue
        if left := process.members():
            why = "it is not in the plan" if process.alive() else "its server is gone"
            pids = ", ".join(str(member.pid) for member in left)
            supervisor.state.add_event(row.name, f"ended what was left (pid {pids}): {why}")
            await process.stop(plan.config.stop_timeout_s)
        supervisor.state.mark_stale(row.name)
        if row.role == "server" and row.name not in specs:
            supervisor.state.forget_process(row.name)
            supervisor.state.forget_server(row.name)
