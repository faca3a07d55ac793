"""Replicas by load: measures the servers' load, and adds or removes replicas as
`core/scaling.py` decides.

    up      the replica that is leaving comes back; sleepers are woken; then others start
    down    the last replica leaves the router ─► two samples without a request ─► closed to users
            ─► out of the fleet ─► asleep ─► stopped after `sleep_s`

What is added starts like a server that was restarted: it takes the fleet's weights before it is
routed, and a push need not wait for it. What leaves belongs to the fleet until it has no requests:
a push meanwhile has it too. Nothing is added or removed beside an operation, a push or a freeze.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skyctl import engines
from skyctl.core.arbiter import Act
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.planning import planned, ports_of, scaled, usable
from skyctl.core.scaling import Decision, Sample, decide, demand_of, kept, policy_of
from skyctl.core.status import ScalingStatus
from skyctl.engines.base import ServerMetrics
from skyctl.errors import ConflictError, SkyctlError
from skyctl.fleetfile.scaling import ScaleSection
from skyctl.states import Phase, ReplicaState
from skyctl.supervisor import rollout
from skyctl.supervisor.fleet import STATUS_TIMEOUT_S, RunningFleet, answers, server_of
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.warming import Warming

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
"""Between two checks whether the fleet scales at all."""
_SAMPLES_WITHOUT_REQUESTS = 2
_RETRY_S, _RETRY_MAX_S = 60.0, 900.0
_STOP_TIMEOUT_S = 15.0


def resized(running: RunningFleet, replicas: int) -> FleetPlan:
    """The plan with this many replicas: those that run, then sleepers, then others.

    Raises:
        UsageError: this machine does not allow it; or as `scaled`.
    """
    before = running.require_plan()
    ports = ports_of(before) | running.sleepers.ports
    has = {"router": before.router is not None, "tinker": before.tinker is not None}
    config = scaled(before.config, replicas)
    return usable(planned(config, before.base_dir, ports, pins=before.pins, **has), ports)


@dataclass
class _Leaving:
    """A replica that has left the router. `samples` in a row saw no request."""

    replica: Replica
    samples: int = 0


class Scaling:
    """Belongs to one fleet. `take` makes a plan the fleet's."""

    def __init__(
        self,
        running: RunningFleet,
        take: Callable[[FleetPlan], None],
        warming: Warming,
    ) -> None:
        self._running = running
        self._take = take
        self._warming = warming
        self._samples: list[Sample] = []
        self._sampled_for: ScaleSection | None = None
        self._tokens: dict[str, tuple[str, float, int]] = {}  # instance, time, counter
        self._leaving: _Leaving | None = None
        self._added: set[str] = set()  # not known to serve yet
        self._removed: list[Replica] = []  # of these, and not ended yet
        self._last_step_down = -math.inf
        self._failures, self._retry_at = 0, -math.inf
        self._step: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Sample and act until cancelled."""
        while True:
            policy = policy_of(self._running.plan)
            await asyncio.sleep(policy.interval_s if policy else _IDLE_S)
            self._step = asyncio.create_task(self.step(), name="scaling")
            await asyncio.wait({self._step})
            if not self._step.cancelled() and (error := self._step.exception()):
                _LOG.error("scaling", exc_info=error)

    async def stop(self) -> None:
        """End what is under way; a replica that was leaving is routed again. The caller is an
        operation, so that nothing begins meanwhile.
        """
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.wait({self._step}, timeout=_STOP_TIMEOUT_S)
        if self._leaving is not None:  # it may have been closed to users
            await self._leaving.replica.wait_confirmed()
        await self._stay()

    async def step(self) -> None:
        """One sample of the load, and what follows from it."""
        running, policy = self._running, policy_of(self._running.plan)
        if running.draining or running.under_way:
            return
        await self._end_sleepers(policy)
        if policy != self._sampled_for:  # earlier samples may be in other units
            self._sampled_for, self._samples = policy, []
        if policy is None:
            running.scaling = None
            await self._stay()
            return
        if running.state.canary() is not None:  # its share is that of the servers there are
            running.scaling = None
            if not running.push_job:  # which may have it out of the router, too
                await self._stay()
            return
        await self._drop_failed()
        sample, serving = await self._observe(policy)
        self._samples = kept(policy, [*self._samples, sample])
        count = len(serving)
        decision = decide(policy, self._samples, count, last_step_down=self._last_step_down)
        self._show(policy, sample, count, decision)
        if running.under_way or running.push_job or self._frozen():
            return
        if decision.count > count:
            await self._grow(decision, count)
        elif self._leaving is not None:
            await self._go_on(policy, self._leaving)
        elif decision.count < count:
            await self._shrink(decision, serving[-1])

    # --- measuring --------------------------------------------------------------------------------

    async def _observe(self, policy: ScaleSection) -> tuple[Sample, list[Replica]]:
        """The load now, and the replicas that serve or will."""
        running, leaving = self._running, self._leaving
        staying = [r for r in running.replicas.values() if not leaving or r is not leaving.replica]
        ready = [replica for replica in staying if replica.state is ReplicaState.READY]
        loads = await answers(ready, lambda replica: server_of(running, replica).metrics())
        measured = {name: metrics for name, metrics in loads.items() if metrics.measured}
        demands = [
            demand
            for replica in ready
            if (demand := self._demand(policy, replica, measured.get(replica.name))) is not None
        ]
        silent = [r.name for r in ready if r.name not in measured]
        missing = [f"{r.name} is {r.state}" for r in staying if r not in ready]
        missing += [f"the load of {name} is not known" for name in silent]
        if len(demands) < len(ready) - len(silent):
            missing.append("not measured long enough")
        sample = Sample(
            time.monotonic(),
            sum(demands),
            len(demands),
            next(iter(missing), ""),
            sum(r.state.in_transition or r.phase is Phase.ADMITTING for r in staying),
        )
        return sample, [replica for replica in staying if not replica.state.stuck]

    def _demand(
        self, policy: ScaleSection, replica: Replica, metrics: ServerMetrics | None
    ) -> float | None:
        """What one server's requests need; None if it is not known, as a rate of one sample is."""
        if metrics is None:
            return None
        now, counter = time.monotonic(), metrics.generation_tokens
        instance, at, earlier = self._tokens.get(replica.name, ("", 0.0, 0))
        self._tokens[replica.name] = (replica.instance, now, counter)
        if policy.target != "tokens":
            return demand_of(policy.target, metrics, 0.0)
        if instance != replica.instance or counter < earlier or now <= at:
            return None
        return demand_of(policy.target, metrics, (counter - earlier) / (now - at))

    def _frozen(self) -> bool:
        """Whether a user has paused a server, or put it to sleep."""
        states = (ReplicaState.PAUSED, ReplicaState.ASLEEP)
        return any(replica.state in states for replica in self._running.replicas.values())

    def _show(self, policy: ScaleSection, sample: Sample, count: int, decision: Decision) -> None:
        self._running.scaling = ScalingStatus(
            replicas=count,
            min=policy.min,
            max=policy.max,
            target=policy.target,
            value=policy.per_replica,
            load=sample.demand / count if sample.answered and count else None,
            reason=decision.reason,
            asleep=self._running.sleepers.asleep,
        )

    # --- up ---------------------------------------------------------------------------------------

    async def _grow(self, decision: Decision, count: int) -> None:
        running, before = self._running, self._running.require_plan()
        if self._leaving is not None:
            running.state.add_event(self._leaving.replica.name, f"stays: {decision.reason}")
            await self._stay()
            return
        scale = before.config.scale
        if scale is None or time.monotonic() < self._retry_at:
            return
        total = min(len(running.replicas) + decision.count - count, scale.max)
        if total <= len(running.replicas):
            return
        try:
            plan = await asyncio.to_thread(resized, running, total)
        except SkyctlError as error:
            self._failed(f"scale: {count} → {decision.count} replicas: {error.message}")
            return
        if not self._may_change(before):
            return
        present = {name: replica.planned for name, replica in running.replicas.items()}
        servers = tuple(present.get(spec.name, spec) for spec in plan.servers)
        new = [spec for spec in servers if spec.name not in present]
        self._change(replace(before, config=plan.config, servers=servers))
        running.state.add_event(
            "fleet", f"scale: {count} → {count + len(new)} replicas, {decision.reason}"
        )
        for spec in new:
            running.start_new(spec)
            self._added.add(spec.name)
        running.replicas = {spec.name: running.replicas[spec.name] for spec in servers}

    async def _drop_failed(self) -> None:
        """Remove what was added and does not come to serve: nobody knows it yet."""
        running = self._running
        for name in list(self._added):
            replica = running.replicas.get(name)
            if replica is None or _serves(replica):
                self._added.discard(name)
                self._failures = 0 if replica else self._failures
            elif replica.state.stuck and self._may_change(plan := running.require_plan()):
                self._added.discard(name)
                self._change(_without(plan, replica.planned))
                reason = replica.row.quarantine or replica.reason
                self._failed(f"scale: {name} was added and does not serve: {reason}")
                self._removed.append(replica)
        await self._remove()

    async def _remove(self) -> None:
        """End those that are in the plan no more; what an operation cuts short goes on after it."""
        running = self._running
        while self._removed and self._may_change(plan := running.require_plan()):
            replica = self._removed.pop()
            planned = any(spec.name == replica.name for spec in plan.servers)
            if planned or running.replicas.get(replica.name) is not replica:
                continue
            try:
                await rollout.remove(running, replica)
            except asyncio.CancelledError:
                self._removed.append(replica)
                raise

    def _failed(self, message: str) -> None:
        wait_s = min(_RETRY_MAX_S, _RETRY_S * 2**self._failures)
        self._failures += not self._added  # once for all that were added together
        self._retry_at = time.monotonic() + wait_s
        self._running.state.add_event("fleet", f"{message}; again in {wait_s:g} s at the earliest")

    # --- down -------------------------------------------------------------------------------------

    async def _shrink(self, decision: Decision, replica: Replica) -> None:
        """Begin to remove a replica."""
        running = self._running
        running.state.add_event(
            "fleet",
            f"scale: {decision.count + 1} → {decision.count} replicas, {decision.reason}: "
            f"{replica.name} leaves",
        )
        self._last_step_down = time.monotonic()
        self._leaving = _Leaving(replica)
        running.held_out.add(replica.name)
        await rollout.sync_router(running)

    async def _go_on(self, policy: ScaleSection, leaving: _Leaving) -> None:
        """Take the leaving replica out of the fleet once it has had no request for two samples."""
        running, replica = self._running, leaving.replica
        if running.replicas.get(replica.name) is not replica or not _serves(replica):
            await self._stay()
            return
        others = (other for other in running.replicas.values() if other is not replica)
        if away := next((o for o in others if o.state is not ReplicaState.READY), None):
            running.state.add_event(replica.name, f"stays: {away.name} is {away.state}")
            await self._stay()
            return
        if replica.name not in running.held_out:  # a push has brought it back meanwhile
            leaving.samples = 0
            running.held_out.add(replica.name)
            await rollout.sync_router(running)
            return
        if await self._has_requests(replica):
            leaving.samples = 0
            return
        leaving.samples += 1
        if leaving.samples < _SAMPLES_WITHOUT_REQUESTS:
            return
        await self._warming.stop()
        before = running.require_plan()
        if not self._may_remove(replica, before) or not await self._closed(replica, before):
            return
        del running.replicas[replica.name]
        self._change(_without(before, replica.planned))
        self._leaving = None
        running.held_out.discard(replica.name)
        running.state.forget_server(replica.name)
        timeout_s = before.config.stop_timeout_s
        await running.sleepers.take(replica, sleep_s=policy.sleep_s, stop_timeout_s=timeout_s)

    async def _closed(self, replica: Replica, before: FleetPlan) -> bool:
        """Close the leaving replica to users: a request is refused from here on, not cut. False: it
        is open again, and stays for now.
        """
        idle = False
        try:
            with self._running.arbiter.take(Act.VERB, "scaling"):  # a push waits, an operation not
                replica.close()
                idle = await replica.wait_confirmed() and not await self._has_requests(replica)
        finally:
            removed = idle and self._may_remove(replica, before)
            if not removed:
                replica.open_again()
        return removed

    def _may_remove(self, replica: Replica, before: FleetPlan) -> bool:
        return replica.name in self._running.held_out and self._may_change(before)

    async def _has_requests(self, replica: Replica) -> bool:
        """Whether it has any, or does not say."""
        client, target = self._running.client, replica.target
        try:
            metrics = await engines.server(client, target, timeout_s=STATUS_TIMEOUT_S).metrics()
        except SkyctlError:
            return True
        return metrics.in_flight > 0 or not metrics.measured

    async def _stay(self) -> None:
        """Route the leaving replica again."""
        if self._leaving is not None:
            replica, self._leaving = self._leaving.replica, None
            self._running.held_out.discard(replica.name)
            await rollout.sync_router(self._running)

    async def _end_sleepers(self, policy: ScaleSection | None) -> None:
        """Stop those that have slept long enough; all of them if the fleet does not scale."""
        plan = self._running.plan
        if plan is not None:
            await self._running.sleepers.end_old(
                sleep_s=policy.sleep_s if policy else 0.0,
                stop_timeout_s=plan.config.stop_timeout_s,
            )

    # --- the fleet --------------------------------------------------------------------------------

    def _may_change(self, before: FleetPlan) -> bool:
        """Whether the plan is still this one, and nobody acts on the fleet now. Until the caller
        awaits something, that stays so.
        """
        running = self._running
        busy = running.under_way or running.draining or running.state.canary() is not None
        if running.plan is not before or busy:
            return False
        try:
            running.arbiter.take(Act.SLEEP, "scaling").release()
        except ConflictError:
            return False
        return True

    def _change(self, plan: FleetPlan) -> None:
        """Make this the plan, with the number of replicas that it has."""
        config = plan.config.model_copy(update={"replicas": len(plan.servers)})
        self._take(replace(plan, config=config))


def _without(plan: FleetPlan, spec: ServerSpec) -> FleetPlan:
    servers: Sequence[ServerSpec] = [server for server in plan.servers if server.name != spec.name]
    return replace(plan, servers=tuple(servers))


def _serves(replica: Replica) -> bool:
    return replica.phase is Phase.UP and not replica.row.quarantine
