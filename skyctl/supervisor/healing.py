"""Recovery of a fleet by its own supervisor, which can restart what cannot be put right; and the
takeover of what a dead supervisor left: adopt what lives, start what died, heal the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from skyctl.core.arbiter import Act
from skyctl.core.diagnosis import Finding, Observed, judge, observe
from skyctl.core.plan import FleetPlan
from skyctl.core.recovery import recover
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.launch import HOSTS
from skyctl.push.request import PushRequest
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.supervisor import admission, rollout
from skyctl.supervisor.wire import spec_hash

if TYPE_CHECKING:
    from skyctl.store.processes import ProcessRow
    from skyctl.supervisor.kept import KeptRunning
    from skyctl.supervisor.resident import Supervisor

_TURN_WAIT_S = 120.0


async def find(supervisor: Supervisor) -> list[Finding]:
    """What is the matter with each replica; those that are up are asked now."""
    state = supervisor.state
    replicas = list(supervisor.replicas.values())
    asked = [replica.target for replica in replicas if replica.phase == "up"]
    seen = {one.server: one for one in await observe(supervisor.client, asked)}
    doubts, weights = in_doubt(state), state.weights()
    findings = []
    for replica in replicas:
        found = seen.get(replica.name) or Observed(replica.name, problem=replica.reason)
        if replica.name not in seen or replica.update_state:
            found = Observed(replica.name, state=replica.state, problem=replica.reason)
        doubted = doubts.get(replica.name)
        findings.append(judge(found, state.server(replica.name), doubted, weights, ours=True))
    return findings


async def heal_in_turn(supervisor: Supervisor) -> None:
    """`heal`, once whoever acts on the fleet has ended."""
    with await supervisor.arbiter.turn(Act.RECOVER, "recovery", wait_s=_TURN_WAIT_S):
        await heal(supervisor)


async def heal(supervisor: Supervisor) -> None:
    """Find what is wrong and put it right; the outcome is in `supervisor.recovered`.

    Raises:
        SkyctlError: something could not be put right.
    """
    supervisor.recovered = ()
    actions = _Actions(supervisor)
    recovered = await recover(await find(supervisor), actions)
    supervisor.recovered = tuple(recovered)
    for one in recovered:
        if one.action != "nothing":
            end = f"could not be put right: {one.detail}" if not one.ok else f"done: {one.action}"
            supervisor.state.add_event(one.server, f"recover: was {one.found}; {end}")
    for replica in supervisor.replicas.values():
        replica.reload_row()
    await admission.refresh_all(supervisor.replicas.values(), supervisor.client, 5.0)
    await rollout.sync_router(supervisor)
    failed = [one for one in recovered if not one.ok]
    if failed:
        raise SkyctlError("; ".join(f"{one.server}: {one.detail}" for one in failed))


class _Actions:
    """What a supervisor can do (see recovery.Actions)."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.state = supervisor.state
        self.client = supervisor.client
        self.control_timeout_s = supervisor.require_plan().config.control_timeout_s
        self.targets: Mapping[str, ServerTarget] = {
            name: replica.target for name, replica in supervisor.replicas.items()
        }

    async def push(self, request: PushRequest, servers: Collection[str]) -> Job:
        return await self._supervisor.pushes.again(request, servers)

    async def bring(self, name: str) -> None:
        supervisor = self._supervisor
        replica = supervisor.replicas[name]
        await admission.push_alone(
            replica, supervisor.state, supervisor.require_plan(), supervisor.client
        )

    async def replace(self, name: str, why: str) -> str:
        replica = self._supervisor.replicas[name]
        self.state.add_event(name, f"restarted: {why}")
        try:
            await rollout.restart(self._supervisor, replica, self._supervisor.require_plan())
        except SkyctlError as error:
            return error.message
        if replica.phase != "up":
            return f"did not come back: {replica.reason}"
        # it runs, and serves nobody: that is not what recovery is for
        return replica.row.quarantine or ""

    def waits(self, name: str, reason: str) -> None:
        self._supervisor.replicas[name].update_row(quarantine=reason)


async def take_over(supervisor: Supervisor, plan: FleetPlan) -> None:
    """Leave what lives as it is, even where it differs from the plan; start what died meanwhile.

    Raises:
        SkyctlError: a replica or a front was given up, or could not be put right.
    """
    reached("adopt.begin")
    await _adopt(supervisor, plan)
    specs = {spec.name: spec for spec in plan.servers}
    for name, spec in specs.items():
        if name not in supervisor.replicas:
            supervisor.new_replica(spec).start()
    supervisor.replicas = {name: supervisor.replicas[name] for name in specs}
    rollout.start_router(supervisor, plan)
    rollout.start_tinker(supervisor, plan)
    reached("adopt.done")
    await _heal_adopted(supervisor)
    supervisor.taken_over = True
    await asyncio.gather(*(r.settled.wait() for r in supervisor.replicas.values()))
    await rollout.settle_fronts(supervisor)
    rollout.raise_for_failures(supervisor)


async def adopt_and_apply(supervisor: Supervisor, plan: FleetPlan) -> None:
    """Adopt what fits a plan and make the rest so. Raises SkyctlError as `apply_plan`."""
    await _adopt(supervisor, plan)
    with contextlib.suppress(SkyctlError):  # each server says so itself
        await _heal_adopted(supervisor)
    await rollout.apply_plan(supervisor, plan)


async def _heal_adopted(supervisor: Supervisor) -> None:
    """Put right what an interrupted push left, once what was adopted answers."""
    adopted = [replica for replica in supervisor.replicas.values() if replica.adopted]
    await asyncio.gather(*(replica.settled.wait() for replica in adopted))
    if in_doubt(supervisor.state):
        await heal_in_turn(supervisor)


async def _adopt(supervisor: Supervisor, plan: FleetPlan) -> None:
    """Take over what an earlier supervisor started and still runs; end what nobody wants.

    One that differs from the plan is adopted as well: to restart it is for whoever wants the plan.
    But for the Tinker API: another endpoint or another skyctl's supervisor would be lost on it, and
    what it was asked for is on disk.
    """
    host = HOSTS[plan.config.launcher]
    specs = {spec.name for spec in plan.servers}
    for row in supervisor.state.unrecorded_processes():
        supervisor.state.add_event(row.name, "ended a process that was not on record")
        try:
            await rollout.stop_recorded(row, host, plan.config.stop_timeout_s)
        except HostUnreachable:  # it is left, as those on record may be
            supervisor.state.save_process(row)
    for row in supervisor.state.processes():
        process = host.adopt(row.identity, row.token, row.descendants)
        if process.alive() and (child := _wanted(supervisor, plan, row)) is not None:
            child.start(process)
            continue
        if left := process.members():
            why = "it is not what the plan has" if process.alive() else "its server is gone"
            pids = ", ".join(str(member.pid) for member in left)
            supervisor.state.add_event(row.name, f"ended what was left (pid {pids}): {why}")
            try:
                await process.stop(plan.config.stop_timeout_s)
            except HostUnreachable as error:  # it may run on: whoever takes its place waits
                supervisor.state.add_event(row.name, error.message)
                if (child := _wanted(supervisor, plan, row)) is not None:
                    child.start_after(process)
                continue
        supervisor.state.mark_stale(row.name)
        if row.role == "server" and row.name not in specs:
            supervisor.state.forget_process(row.name)
            supervisor.state.forget_server(row.name)


def _wanted(supervisor: Supervisor, plan: FleetPlan, row: ProcessRow) -> KeptRunning | None:
    """What is to keep a process of this name running; None where the plan has none."""
    if row.role == "router":
        return rollout.new_router(supervisor, plan.router) if plan.router else None
    if row.role == "tinker":
        same = plan.tinker is not None and row.spec_hash == spec_hash(plan.tinker)
        return rollout.new_tinker(supervisor, plan.tinker) if plan.tinker and same else None
    spec = next((spec for spec in plan.servers if spec.name == row.name), None)
    return supervisor.new_replica(spec) if spec else None
