"""Recovery of a fleet by its own supervisor, which can restart what cannot be repaired; and the
takeover of what a dead supervisor left: adopt what lives, start what died, recover the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from skyctl.core.arbiter import LATE_S, Act
from skyctl.core.diagnosis import healthy, judge
from skyctl.core.findings import Finding
from skyctl.core.observation import Observed, observe
from skyctl.core.plan import FleetPlan
from skyctl.core.recovery import recover
from skyctl.errors import SkyctlError
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.launch import HOSTS
from skyctl.push.request import PushRequest
from skyctl.states import FleetEvent, Phase
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.supervisor import admission, rollout
from skyctl.supervisor.canary import drain_ending, end_if_returned, push_ended
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.pushes import Pushes
from skyctl.supervisor.weights import push_alone
from skyctl.supervisor.wire import spec_hash

if TYPE_CHECKING:
    from skyctl.launch.base import Host
    from skyctl.store.processes import ProcessRow
    from skyctl.supervisor.kept import KeptRunning

_TURN_WAIT_S = 120.0


async def find(running: RunningFleet) -> list[Finding]:
    """Diagnose each replica; those that are up are asked now."""
    state = running.state
    replicas = list(running.replicas.values())
    targets = [replica.target for replica in replicas if replica.phase is Phase.UP]
    seen = {answer.server: answer for answer in await observe(running.client, targets)}
    doubts = in_doubt(state)
    findings = []
    for replica in replicas:
        if replica.phase is Phase.ASLEEP:
            findings.append(healthy(replica.name, replica.reason))
            continue
        observed = seen.get(replica.name) or Observed(replica.name, problem=replica.reason)
        if replica.name not in seen or replica.in_push:
            observed = Observed(replica.name, state=replica.state, problem=replica.reason)
        doubted, weights = doubts.get(replica.name), state.weights_of(replica.name)
        findings.append(judge(observed, state.server(replica.name), doubted, weights, ours=True))
    return findings


async def heal_in_turn(running: RunningFleet, pushes: Pushes) -> None:
    """`heal`, once the current turn on the fleet has ended."""
    servers = running.urls_of(running.replicas.values())
    async with pushes.copying.aside():
        turn = running.arbiter.turn(Act.RECOVER, "recovery", servers=servers, wait_s=_TURN_WAIT_S)
        with await turn:
            await heal(running, pushes)


async def heal(running: RunningFleet, pushes: Pushes) -> None:
    """Find what is wrong and repair it; the outcome is in `running.recovered`.

    Raises:
        SkyctlError: something could not be repaired.
    """
    running.recovered = ()
    await drain_ending(running)
    recovered = await recover(await find(running), _Actions(running, pushes))
    running.recovered = tuple(recovered)
    for replica in running.replicas.values():
        replica.reload_row()
    await admission.refresh_all(running.replicas.values(), running.client, 5.0)
    end_if_returned(running)
    await rollout.sync_router(running)
    failed = [repair for repair in recovered if not repair.ok]
    if failed:
        raise SkyctlError("; ".join(f"{repair.server}: {repair.detail}" for repair in failed))


class _Actions:
    """What a supervisor can do (see recovery.Actions)."""

    def __init__(self, running: RunningFleet, pushes: Pushes) -> None:
        self._running = running
        self._pushes = pushes
        self.state = running.state
        self.client = running.client
        self.control_timeout_s = running.require_plan().config.control_timeout_s
        self.targets: Mapping[str, ServerTarget] = {
            name: replica.target for name, replica in running.replicas.items()
        }

    async def push(self, request: PushRequest, servers: Collection[str]) -> Job:
        return await self._pushes.again(request, servers)

    async def bring(self, name: str) -> None:
        await push_alone(self._running.replicas[name], self._running)

    async def replace(self, name: str, reason: str) -> str:
        replica = self._running.replicas[name]
        self.state.add_event(name, f"restarted: {reason}", FleetEvent.REPLICA_REPLACED)
        try:
            await rollout.restart(self._running, replica, replica.planned)
        except SkyctlError as error:
            return error.message
        if replica.phase is not Phase.UP:
            return f"did not come back: {replica.reason}"
        # it runs, and serves no user: that is not a case for recovery
        return replica.row.quarantine or ""

    def waits(self, name: str, reason: str) -> None:
        self._running.replicas[name].update_row(quarantine=reason)


async def take_over(running: RunningFleet, pushes: Pushes, plan: FleetPlan) -> None:
    """Leave what lives as it is, even where it differs from the plan; start what died meanwhile.

    Raises:
        SkyctlError: a replica or a front was given up, or could not be repaired.
    """
    reached("adopt.begin")
    await _adopt(running, plan)
    specs = {spec.name: spec for spec in plan.servers}
    for name, spec in specs.items():
        if name not in running.replicas:
            running.new_replica(spec).start()
    running.replicas = {name: running.replicas[name] for name in specs}
    rollout.start_router(running, plan)
    rollout.start_tinker(running, plan)
    reached("adopt.done")
    await _heal_adopted(running, pushes)
    running.taken_over = True
    await asyncio.gather(*(r.settled.wait() for r in running.replicas.values()))
    await _heal_adopted(running, pushes)  # what a push beside it has left
    await rollout.settle_fronts(running)
    rollout.raise_for_failures(running)


async def adopt(running: RunningFleet, pushes: Pushes, plan: FleetPlan) -> None:
    """Adopt what fits a plan, before the others are brought to it."""
    await _adopt(running, plan)
    with contextlib.suppress(SkyctlError):  # each server reports it itself
        await _heal_adopted(running, pushes)


async def _heal_adopted(running: RunningFleet, pushes: Pushes) -> None:
    """Repair what an interrupted push left, once the adopted servers answer."""
    adopted = [replica for replica in running.replicas.values() if replica.adopted]
    await asyncio.gather(*(replica.settled.wait() for replica in adopted))
    if push_ended(running.state) or in_doubt(running.state):
        await heal_in_turn(running, pushes)


async def _adopt(running: RunningFleet, plan: FleetPlan) -> None:
    """Adopt what an earlier supervisor started and still runs; end what the plan does not have.

    A process that differs from the plan is adopted as well: restarting it is up to whoever wants
    the plan. The Tinker API is the exception: it would miss a new endpoint or a supervisor of
    another skyctl, and its pending requests are on disk.
    """
    host = HOSTS[plan.config.launcher]
    admitted = any(record.by_admission for record in in_doubt(running.state).values())
    if admitted or running.arbiter.died():
        await asyncio.sleep(LATE_S)  # the supervisor before may have died amid it
    for row in running.state.unrecorded_processes():
        running.state.add_event(row.name, "ended a process that was not on record")
        try:
            await rollout.stop_recorded(row, host, plan.config.stop_timeout_s)
        except SkyctlError:  # left as it is, like any process on record
            running.state.save_process(row)
    # at once: what lives is not to wait for a machine that is silent
    rows = running.state.processes()
    adopting = (_adopt_one(running, plan, host, row) for row in rows)
    rollout.raise_all(await asyncio.gather(*adopting, return_exceptions=True))


async def _adopt_one(running: RunningFleet, plan: FleetPlan, host: Host, row: ProcessRow) -> None:
    process = host.adopt(row.identity, row.token, row.descendants)
    if process.alive() and (child := _keeper(running, plan, row)) is not None:
        child.start(process)
        return
    if members := process.members():
        reason = "it is not what the plan has" if process.alive() else "its server is gone"
        pids = ", ".join(str(member.pid) for member in members)
        running.state.add_event(row.name, f"ended what was left (pid {pids}): {reason}")
        try:
            await process.stop(plan.config.stop_timeout_s)
        except SkyctlError as error:  # it may still run: whatever takes its place waits
            running.state.add_event(row.name, error.message)
            if (child := _keeper(running, plan, row)) is not None:
                child.start_after(process)
            return
    running.state.mark_stale(row.name)
    if row.role == "server" and all(spec.name != row.name for spec in plan.servers):
        running.state.forget_process(row.name)
        running.state.forget_server(row.name)


def _keeper(running: RunningFleet, plan: FleetPlan, row: ProcessRow) -> KeptRunning | None:
    """What is to keep a process of this name running; None if the plan has none."""
    if row.role == "router":
        return rollout.new_router(running, plan.router) if plan.router else None
    if row.role == "tinker":
        same = plan.tinker is not None and row.spec_hash == spec_hash(plan.tinker)
        return rollout.new_tinker(running, plan.tinker) if plan.tinker and same else None
    spec = next((spec for spec in plan.servers if spec.name == row.name), None)
    return running.new_replica(spec) if spec else None
