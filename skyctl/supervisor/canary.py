"""The canary of a supervised fleet: begun, compared, promoted and rolled back, by hand or by rule.

    start     record it ─► the router's shares ─► push into its servers ─► serving
              └─ fails, or is cancelled ─► ending
    promote   push it into all servers: it is the fleet's version
    rollback  ending ─► its servers get the fleet's weights back ─► no record of it

It is on record before a server is touched. A supervisor that finds a canary that starts ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Protocol

from skyctl import engines
from skyctl.core.canary import (
    CanaryRequest,
    CanaryStatus,
    Rule,
    compared,
    refuse_plan,
    servers_for,
    total,
    verdict,
)
from skyctl.core.plan import FleetPlan
from skyctl.core.repeated import published
from skyctl.engines.traffic import ServerTraffic
from skyctl.errors import ConflictError, NotFoundError, SkyctlError, UsageError
from skyctl.kill_points import reached
from skyctl.push.request import PushRequest
from skyctl.states import Phase, ReplicaState
from skyctl.store.fleet_weights import Canary, CanaryStage, FleetWeights
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.store.state import FleetState
from skyctl.supervisor.admission import is_current
from skyctl.supervisor.fleet import STATUS_TIMEOUT_S, RunningFleet, answers
from skyctl.supervisor.rollout import drain_all, sync_router

_POLL_S = 0.05
_FIRST_RETRY_S, _LAST_RETRY_S = 10.0, 300.0
_ENDS = "end it first: skyctl canary promote, or skyctl canary rollback"


class BeginPush(Protocol):
    """Begins a push, unless `check` raises after the last wait before it."""

    def __call__(self, request: PushRequest, *, check: Callable[[], None]) -> Awaitable[Job]: ...


class Canaries:
    """`begin_push` begins one, of a canary or that promotes it; `recover` begins to bring servers
    to the weights that they are to have, and returns the operation's number.
    """

    def __init__(
        self,
        running: RunningFleet,
        begin_push: BeginPush,
        recover: Callable[[], int],
    ) -> None:
        self._running = running
        self._begin_push = begin_push
        self._recover = recover
        self._counting: asyncio.Task[None] | None = None
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S

    async def act(self, request: CanaryRequest) -> CanaryStatus:
        """As `FleetService.canary`."""
        job, operation = "", 0
        if request.action == "start":
            job = (await self._start(request)).id
        elif request.action == "promote":
            job = (await self._promote()).id
        elif request.action == "rollback":
            operation = self._roll_back("as requested")
        return replace(await self._status(), job=job, operation=operation)

    async def tend(self) -> None:
        """Begin to count for a canary that has begun to serve, and do what its rules demand. Begin
        again to bring the servers of one that ends back, if that has failed.
        """
        state = self._running.state
        canary = state.canary()
        if canary is not None and canary.stage is CanaryStage.ENDING:
            self._return_again()
        if canary is None or canary.stage is not CanaryStage.SERVING:
            return
        if not canary.counted:
            await self._count()
            return
        if not canary.rollback_if and canary.promote_after_s is None:
            return
        replicas = [self._running.replicas.get(name) for name in canary.servers]
        counted = await self._traffic(canary)
        ready = all(replica and replica.state is ReplicaState.READY for replica in replicas)
        ready = ready and {*canary.servers} <= counted.keys()
        traffic = total(counted, canary.servers) if counted.keys() & {*canary.servers} else None
        action, reason = verdict(canary, traffic, time.time(), ready=ready)
        if action is None or state.canary() != canary:
            return
        with suppress(ConflictError):  # something else is being done: the next look repeats it
            if action == "rollback":
                self._roll_back(reason)
            else:
                await self._promote_once(canary, reason)

    async def _start(self, request: CanaryRequest) -> Job:
        running, state = self._running, self._running.state
        plan, push = running.require_plan(), request.push
        refuse_push(state)
        if push is None:
            raise UsageError("a canary needs a checkpoint")
        refuse(plan, None)
        for rule in request.rollback_if:
            Rule.parsed(rule)
        if request.rollback_if and engines.ENGINES[plan.config.engine].traffic is None:
            raise UsageError(f"nothing counts what {plan.config.engine} servers answer: no rules")
        names = servers_for(request.share, request.replicas, list(running.replicas))
        canary = Canary(
            FleetWeights(),
            names,
            request.share,
            CanaryStage.STARTING,
            time.time(),
            request.rollback_if,
            request.promote_after_s,
        )
        with state.durable():
            state.set_canary(canary)
        reached("canary.recorded")
        try:
            # drained first: no answer is of two versions
            job = await self._begin_push(
                replace(push, servers=names, rolling=len(names), pause_mode="wait"),
                check=lambda: self._refuse_changed(canary),
            )
        except BaseException:
            if self._stands(canary):
                state.set_canary(None)
            raise
        running.changed()
        self._counting = asyncio.create_task(self._count_after(job))
        return job

    async def _count_after(self, job: Job) -> None:
        journal = self._running.state.journal
        while not journal.job(job.id, in_full=False).ended:  # noqa: ASYNC110 - another task's
            await asyncio.sleep(_POLL_S)
        await self.tend()

    async def _promote(self) -> Job:
        canary = self._serving()
        request = await asyncio.to_thread(published, canary.weights)
        return await self._begin_push(request, check=lambda: self._refuse_changed(canary))

    async def _promote_once(self, canary: Canary, reason: str) -> None:
        """By rule: another attempt would fail as well."""
        state = self._running.state
        try:
            happened = f"{(await self._promote()).id}: canary promoted by rule, once: {reason}"
        except ConflictError:
            raise
        except SkyctlError as error:
            happened = f"canary {canary.weights.version} cannot be promoted by rule: {error}"
        if self._stands(canary):
            state.set_canary(replace(canary, promote_after_s=None))
        state.add_event("fleet", happened)

    def _roll_back(self, reason: str) -> int:
        state = self._running.state
        canary = state.canary()
        if canary is None:
            raise self._none()
        begins = canary.stage is CanaryStage.STARTING
        if begins or self._running.push_job is not None or self._running.under_way is not None:
            raise ConflictError(
                f"fleet {self._running.paths.name} is busy: its canary cannot be rolled back now",
                hint="follow it: skyctl status; end a push: skyctl jobs cancel ID",
            )
        operation = self._recover()  # may be refused; its task runs once this is on record
        with state.durable():
            state.set_canary(replace(canary, stage=CanaryStage.ENDING))
        state.add_event("fleet", f"canary {canary.weights.version} ends: {reason}")
        self._retry_at, self._retry_s = 0.0, _FIRST_RETRY_S
        return operation

    def _return_again(self) -> None:
        running, now = self._running, time.monotonic()
        if running.push_job is None and running.under_way is None and now >= self._retry_at:
            with suppress(ConflictError):  # something else is being done
                self._recover()
                self._retry_at = now + self._retry_s
                self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _stands(self, canary: Canary) -> bool:
        """Whether it is still on record, at the same stage."""
        now = self._running.state.canary()
        return now is not None and (now.began_at, now.stage) == (canary.began_at, canary.stage)

    def _refuse_changed(self, canary: Canary) -> None:
        if not self._stands(canary):
            raise ConflictError("the canary has ended meanwhile", hint="skyctl canary status")

    def _serving(self) -> Canary:
        canary = self._running.state.canary()
        if canary is None:
            raise self._none()
        if canary.stage is not CanaryStage.SERVING:
            raise ConflictError(f"the canary is {canary.stage}", hint="skyctl canary status")
        return canary

    def _none(self) -> NotFoundError:
        return NotFoundError(
            f"fleet {self._running.paths.name} has no canary",
            hint="start one: skyctl canary start CKPT --share 10%",
        )

    async def _status(self) -> CanaryStatus:
        state = self._running.state
        canary = state.canary()
        if canary is None:
            return CanaryStatus()
        counted = await self._traffic(canary)
        counted = {name: counted.get(name, ServerTraffic()) for name in self._running.replicas}
        return CanaryStatus(
            canary.stage,
            canary.began_at,
            compared(canary, state.weights().version, counted),
            canary.rollback_if,
            canary.promote_after_s,
        )

    async def _count(self) -> None:
        """Remember what every server has counted by now."""
        state, replicas = self._running.state, self._running.replicas
        counted = await self._answers()
        canary = state.canary()
        if canary is None or canary.stage is not CanaryStage.SERVING:
            return
        if {*canary.servers} <= counted.keys():  # otherwise the next look repeats it
            begins = {
                name: {"instance": replicas[name].instance, "traffic": asdict(traffic)}
                for name, traffic in counted.items()
            }
            state.set_canary(replace(canary, counted=begins))

    async def _traffic(self, canary: Canary) -> dict[str, ServerTraffic]:
        """What each server that answers has answered since the canary began to serve, or since its
        own start; nothing before it has begun to count.
        """
        if not canary.counted:
            return {}
        counted = await self._answers()
        for name, traffic in counted.items():
            began = canary.counted.get(name)
            if began and began["instance"] == self._running.replicas[name].instance:
                counted[name] = traffic.combined(ServerTraffic.from_json(began["traffic"]), -1)
        return counted

    async def _answers(self) -> dict[str, ServerTraffic]:
        running = self._running
        read = engines.ENGINES[running.require_plan().config.engine].traffic
        if read is None:
            return {}
        up = [replica for replica in running.replicas.values() if replica.phase is Phase.UP]
        return await answers(
            up, lambda replica: read(running.client, replica.target, STATUS_TIMEOUT_S)
        )


def refuse(plan: FleetPlan, canary: Canary | None) -> None:
    """Raise UsageError for a plan that cannot have a canary, or not this one."""
    routing = engines.ENGINES[plan.config.engine].routing
    refuse_plan(plan, canary, routing.counting_policies if routing else ())


def refuse_push(state: FleetState) -> None:
    """Raise ConflictError for a push that would mix a canary with a third version."""
    if (canary := state.canary()) is not None:
        version = canary.weights.version or "a canary"
        raise ConflictError(
            f"{version} is {canary.stage} on {', '.join(canary.servers)}", hint=_ENDS
        )


def push_ended(state: FleetState, job: Job | None = None) -> bool:
    """Called with each push that ended, without one at a takeover: that of a canary that did not
    succeed ends it. Returns whether its servers are to be brought back.
    """
    canary = state.canary()
    own = job is None or job.request.get("servers")
    if own and canary is not None and canary.stage is CanaryStage.STARTING:
        canary = replace(canary, stage=CanaryStage.ENDING)
        state.set_canary(canary)
    return canary is not None and canary.stage is CanaryStage.ENDING


async def drain_ending(running: RunningFleet) -> None:
    """Wait for the requests of the servers of a canary that ends, which are routed no more."""
    canary = running.state.canary()
    if canary is not None and canary.stage is CanaryStage.ENDING:
        await sync_router(running)
        names = running.replicas.keys() & {*canary.servers} - {*in_doubt(running.state)}
        await drain_all(running, [running.replicas[name] for name in sorted(names)])


def end_if_returned(running: RunningFleet) -> None:
    """Forget a canary that ends, once each of its servers has the fleet's weights, or serves no
    user.
    """
    state = running.state
    canary = state.canary()
    if canary is None or canary.stage is not CanaryStage.ENDING:
        return
    replicas = [running.replicas[name] for name in canary.servers if name in running.replicas]
    if all(
        replica.phase is not Phase.UP or replica.row.quarantine or is_current(state, replica)
        for replica in replicas
    ):
        state.set_canary(None)
        running.changed()
