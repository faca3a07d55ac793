"""What a supervisor keeps running: replicas and fronts, the work in progress on them, which are
routed to; and the status of it all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from skyctl import engines
from skyctl.core.canary import entries
from skyctl.core.diagnosis import assess
from skyctl.core.findings import Condition, Finding, Severity
from skyctl.core.health import routable
from skyctl.core.plan import FleetPlan, RouterSpec, ServerSpec, config_digest
from skyctl.core.recorded import RecordedFleet, down_error
from skyctl.core.recovery import Recovered
from skyctl.core.scaling import unmeasured
from skyctl.core.status import (
    FleetStatus,
    Operation,
    ReplicaStatus,
    RouterStatus,
    RunningCanary,
    ScalingStatus,
    TinkerStatus,
)
from skyctl.engines.base import Server, ServerMetrics
from skyctl.engines.logs import latest_message, tail, this_run
from skyctl.errors import SkyctlError, no_server
from skyctl.http.client import ControlClient
from skyctl.states import Phase, PushState, ReplicaState
from skyctl.store.adapters import served
from skyctl.store.fleet_weights import CanaryStage
from skyctl.store.in_doubt import in_doubt
from skyctl.store.journal import Job
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.admission import is_current, off_base, refresh_all
from skyctl.supervisor.front import Front, TinkerChild
from skyctl.supervisor.reconcile import Changes, compare
from skyctl.supervisor.replica import Replica, ReplicaContext
from skyctl.supervisor.router import RouterChild
from skyctl.supervisor.sleepers import Sleepers
from skyctl.units import count_of, waits_for

T = TypeVar("T")

STATUS_TIMEOUT_S = 2.0
_LOG_LINES = 20  # a message of vLLM's may span this many


class RunningFleet(RecordedFleet):
    """Belongs to one event loop. `push_job` is the push under way; `recovered` is the outcome of
    the last recovery; `taken_over`: what was alive has been adopted and repaired, the rest may
    still be starting.
    """

    def __init__(
        self, paths: FleetPaths, state: FleetState, client: ControlClient | None = None
    ) -> None:
        super().__init__(paths, state)
        self.client = client or ControlClient()
        self.plan: FleetPlan | None = None
        self.replicas: dict[str, Replica] = {}
        self.router: RouterChild | None = None
        self.tinker: TinkerChild | None = None
        self.held_out: set[str] = set()  # kept out of the router while something is done to them
        self.freezing: set[str] = set()  # likewise, while a verb freezes them
        self.verbs_under_way = 0
        self.draining = False
        self.operation: Operation | None = None
        self.started_by_operation: list[str] = []
        self.before: FleetPlan | None = None  # in force until the change that is under way
        self.progress: tuple[int, int] | None = None  # servers restarted, of how many
        self.replaced: dict[str, ServerSpec] = {}  # with what the servers of this step served
        self.router_before: RouterSpec | None = None  # another is starting in its place
        self.failed_logs: dict[str, tuple[str, ...]] = {}  # of what has its old settings again
        self.push_job: Job | None = None
        self.recovered: tuple[Recovered, ...] = ()
        self.taken_over = False
        self.unbound: dict[str, str] = {}  # what does not listen although it should, and why
        self.sleepers = Sleepers(state, self.client)
        self.scaling: ScalingStatus | None = None  # None where load does not decide
        self._context: ReplicaContext | None = None
        self._looking = False
        self._unanswering: Replica | None = None  # the last to be replaced for missed probes

    @property
    def not_listening(self) -> str:
        """Why clients cannot reach it although they should; "" if they can."""
        return "; ".join(self.unbound.values())

    def require_plan(self) -> FleetPlan:
        """The plan of the running fleet. Raises FleetDownError if none was started yet."""
        if self.plan is None:
            raise down_error(self.paths.name)
        return self.plan

    @property
    def under_way(self) -> Operation | None:
        """The operation that has not ended."""
        operation = self.operation
        return operation if operation is not None and operation.ended_at is None else None

    def named(self, names: Sequence[str]) -> list[Replica]:
        """Replicas by name, each once, all if empty. Raises NotFoundError for an unknown one."""
        self.require_plan()
        for name in names:
            if name not in self.replicas:
                raise no_server(self.paths.name, name, self.replicas)
        once = dict.fromkeys(names) or self.replicas
        return [self.replicas[name] for name in once]

    @staticmethod
    def urls_of(replicas: Iterable[Replica]) -> dict[str, str]:
        """The URLs of replicas, by name."""
        return {replica.name: replica.spec.url for replica in replicas}

    def unanswering(self, replica: Replica) -> str:
        """The server that is being replaced because it did not answer; "" if there is none: then
        this one is.
        """
        other = self._unanswering
        if other not in (None, replica) and not other.phase.settled:
            return other.name
        self._unanswering = replica
        return ""

    def changes(self, plan: FleetPlan) -> Changes:
        """What a plan would change."""
        running = {name: _runs(replica) for name, replica in self.replicas.items()}
        return compare(plan, running, _runs(self.router), _runs(self.tinker))

    def new_replica(self, spec: ServerSpec) -> Replica:
        """A replica of this fleet, not started yet."""
        assert self._context is not None  # made with the first plan
        self.replicas[spec.name] = replica = Replica(spec, self._context)
        return replica

    def start_new(self, spec: ServerSpec) -> Replica:
        """Start a replica that the fleet does not have, or wake it."""
        replica = self.new_replica(spec)
        self.sleepers.start(replica)
        return replica

    def desired(self) -> dict[str, str]:
        """URLs the router should route to, by server name."""
        if self.draining:
            return {}
        # a server being admitted is shown as updating but is not frozen: until its push begins it
        # answers with the weights it was started from
        out = self.held_out | self.freezing | self._returning()
        states = {
            name: replica.state
            for name, replica in self.replicas.items()
            if name not in out and replica.phase is not Phase.ADMITTING
        }
        by_role: dict[str, dict[str, ReplicaState]] = {}
        for name, state in states.items():
            by_role.setdefault(self.replicas[name].spec.role, {})[name] = state
        names = set().union(*map(routable, by_role.values()))
        if self.verbs_under_way:
            # no reason to restart a router of prefill/decode pairs, which cuts requests
            names |= {n for n, s in states.items() if s.queues and self.replicas[n].spec.role}
        return {name: self.replicas[name].spec.url for name in sorted(names)}

    def _returning(self) -> set[str]:
        """Servers of a canary that ends, as long as they do not have the fleet's weights."""
        canary = self.state.canary()
        names = canary.servers if canary and canary.stage is CanaryStage.ENDING else ()
        replicas = [self.replicas[name] for name in names if name in self.replicas]
        return {replica.name for replica in replicas if not is_current(self.state, replica)}

    def entries(self) -> dict[str, int]:
        """How often the router lists each server: more than once for the shares of a canary."""
        canary = self.state.canary()
        return {} if canary is None else entries(canary, self.desired())

    def undecided(self) -> set[str]:
        """URLs of adopted servers that have not been asked yet, and that there is no reason not to
        route: the router keeps those that it has.
        """
        doubts, phases = in_doubt(self.state), (Phase.STARTING, Phase.ADMITTING)
        return {
            replica.spec.url
            for name, replica in self.replicas.items()
            if replica.adopted and replica.phase in phases and name not in doubts
            if not (self.draining or name in self.held_out or replica.asleep)
            if not (replica.row.quarantine or replica.row.sleep_level)
            if is_current(self.state, replica)
        }

    def routed(self) -> dict[str, str]:
        """The same for clients that go through the router, if there is one: none until it is up."""
        return self.desired() if self.router is None or self.router.phase is Phase.READY else {}

    def wake_tinker(self) -> None:
        """Wake the Tinker API: it may be waiting for a server, or for the router."""
        if self.tinker is not None and self.tinker.phase is Phase.WAITING:
            self.tinker.wake()

    def changed(self) -> None:
        """Some replica's state changed: all are checked soon, once for any number of changes."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._note_states)

    def _note_states(self) -> None:
        self._looking = False
        for replica in self.replicas.values():
            replica.note_state()
        if self.router is not None:
            self.router.wake()
        self.wake_tinker()


def _runs(child: Replica | Front | None) -> str | None:
    """The hash of what runs; None if nothing does."""
    return None if child is None or child.phase.ended else child.running_hash


async def report(running: RunningFleet, *, fresh: bool = True) -> FleetStatus:
    """The fleet as its supervisor sees it now; servers have `STATUS_TIMEOUT_S` to answer.

    Unless `fresh`, a pause by another client shows only with the next health probe.
    """
    replicas = list(running.replicas.values())
    up = [replica for replica in replicas if replica.phase is Phase.UP]
    polled = [replica for replica in up if fresh and not replica.in_push]
    metrics, versions, failed = await asyncio.gather(
        answers(up, lambda replica: server_of(running, replica).metrics()),
        answers(polled, lambda replica: server_of(running, replica).weight_version()),
        refresh_all(polled, running.client, STATUS_TIMEOUT_S),
    )
    rows = tuple(
        _replica_row(running, r, metrics.get(r.name), versions.get(r.name), failed)
        for r in replicas
    )
    router, tinker = _front_statuses(running)
    canary = RunningCanary.recorded(running.state.canary())
    health, reasons = assess(
        rows,
        router,
        tinker,
        canary=canary,
        pushing=running.push_job is not None,
        operation=running.under_way.kind if running.under_way else None,
    )
    if running.plan is not None and (finding := off_base(running.state, running.plan)):
        reasons += (finding,)
    return FleetStatus(
        name=running.paths.name,
        health=health,
        replicas=rows,
        router=router,
        reasons=(*reasons, *_own_problems(running)),
        supervised=True,
        supervisor_pid=os.getpid(),
        device=running.plan.device if running.plan else None,
        model=running.plan.served_model_name if running.plan else None,
        base=running.plan.base if running.plan else None,
        weight_version=running.state.weights().version,
        operation=running.operation,
        job=running.push_job.id if running.push_job else None,
        rollout=_rollout(running),
        adapters=tuple(adapter.served_as for adapter in served(running.state).values()),
        tinker=tinker,
        canary=canary,
        config_digest=config_digest(running.plan.config) if running.plan else "",
        scaling=running.scaling or unmeasured(running.plan, running.state, len(rows)),
    )


def _own_problems(running: RunningFleet) -> Iterator[Finding]:
    """What keeps the supervisor itself from its work, or requests from the fleet."""
    if running.state.drained:
        detail, hint = "load balancers are told to send nothing", "skyctl drain --off"
        yield Finding("", Condition.REQUESTED, detail, hint=hint, severity=Severity.OK)
    if (lost := running.state.unrecorded) is not None:
        detail = f"{lost.path} cannot be written: {lost.reason}"
        yield Finding("", Condition.UNRECORDED, detail, hint=lost.hint)
    if running.not_listening:
        detail, hint = running.not_listening, "put it right, then: skyctl up"
        yield Finding("", Condition.UNREACHABLE, detail, hint=hint)


def _front_statuses(running: RunningFleet) -> tuple[RouterStatus | None, TinkerStatus | None]:
    """Of the router and of the Tinker API; None where there is none."""
    router = tinker = None
    if running.router is not None:
        router = RouterStatus(
            **_front_row(running.router),
            metrics_port=running.router.spec.metrics_port,
            workers=len(running.router.workers),
        )
    if running.tinker is not None:
        tinker = TinkerStatus(**_front_row(running.tinker), **running.tinker.training)
    return router, tinker


def _rollout(running: RunningFleet) -> str | None:
    """`push-7: 1 of 3 servers updated` while a push rolls; `up: 1 of 3 servers restarted`."""
    job = running.push_job
    if job is None and running.under_way and running.progress:
        done, total = running.progress
        return f"{running.under_way.kind}: {done} of {count_of(total, 'server')} restarted"
    if job is None or not job.request.get("rolling"):
        return None
    states = running.state.journal.job(job.id).servers
    done = sum(PushState(server["state"]).complete for server in states.values())
    return f"{job.id}: {done} of {count_of(len(running.replicas), 'server')} updated"


def server_of(running: RunningFleet, replica: Replica) -> Server:
    """To ask it for at most `STATUS_TIMEOUT_S` seconds."""
    return engines.server(running.client, replica.target, timeout_s=STATUS_TIMEOUT_S)


async def answers(
    replicas: Sequence[Replica], question: Callable[[Replica], Awaitable[T]]
) -> dict[str, T]:
    """What these servers answer, by name; those that do not are left out."""

    async def ask(replica: Replica) -> None:
        with contextlib.suppress(SkyctlError):
            answered[replica.name] = await question(replica)

    answered: dict[str, T] = {}
    await asyncio.gather(*map(ask, replicas))
    return answered


def _replica_row(
    running: RunningFleet,
    replica: Replica,
    metrics: ServerMetrics | None,
    version: str | None,
    failures: Mapping[str, str],
) -> ReplicaStatus:
    router = running.router
    lines: list[str] = []
    if replica.phase is Phase.STARTING:
        lines = this_run(tail(running.paths.log(replica.name), _LOG_LINES))
    state, reason = replica.state, replica.row.quarantine or replica.reason
    failed = failures.get(replica.name)
    if failed and state.as_intended:
        # the probes have not counted enough failures yet
        state, reason = ReplicaState.UNREACHABLE, failed
    drained = replica.name in running.held_out and running.under_way
    if drained and state is ReplicaState.READY and metrics and metrics.in_flight:
        reason = waits_for(metrics.in_flight)
    elif replica.phase is Phase.WAITING:
        reason = "waits for its GPU"
    elif replica.phase is Phase.STARTING and not replica.spec.port:
        reason = "waits for a node"
    return ReplicaStatus(
        name=replica.name,
        state=state,
        url=replica.spec.url,
        reason=reason,
        routed=None if router is None else replica.spec.url in router.workers,
        pid=replica.process.pid if replica.process else None,
        port=replica.spec.port,
        gpus=replica.spec.gpus,
        node=replica.spec.machines,
        role=replica.spec.role,
        **(metrics.load() if metrics else {}),
        weight_version=replica.row.weight_version,
        reported_version=version,
        uptime_s=_since(replica.started_at),
        state_s=_since(replica.state_since),
        rss_bytes=replica.process.resident_bytes() if replica.process else None,
        restarts=len(replica.restarts),
        restart_reason=replica.restart_reason,
        log_line=latest_message(lines),
    )


def _front_row(front: Front) -> dict[str, Any]:
    waits = front.phase is Phase.WAITING
    return {
        "state": front.state,
        "url": front.spec.url,
        "reason": "waits for a server" if waits else front.reason,
        "pid": front.process.pid if front.process else None,
        "port": front.spec.port,
        "uptime_s": _since(front.started_at),
        "rss_bytes": front.process.resident_bytes() if front.process else None,
        "restarts": len(front.restarts),
        "restart_reason": front.restart_reason,
    }


def _since(started_at: float | None) -> float | None:
    return None if started_at is None else max(0.0, time.time() - started_at)
