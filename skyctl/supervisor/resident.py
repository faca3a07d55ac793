"""The supervisor of one fleet: it owns replicas and fronts, and does one thing at a time.

An operation (up, restart, scale, undo, down) changes which processes there are; a push job changes
their weights. Only one of all these runs at any time; a second is refused and told which one is
running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from skyctl.core import jobs, verbs
from skyctl.core.arbiter import Act, Turn, hung_up
from skyctl.core.canary import CanaryRequest, CanaryStatus
from skyctl.core.check_machines import refuse_unseen
from skyctl.core.expectations import verify_servers
from skyctl.core.findings import Finding
from skyctl.core.keeping import place_copies
from skyctl.core.pinning import pin
from skyctl.core.plan import FleetPlan, ServerSpec, config_digest, local_url
from skyctl.core.planning import planned, ports_of
from skyctl.core.recovery import Recovered
from skyctl.core.registry import keep_applied, restore_applied
from skyctl.core.requests import (
    CloseUpdate,
    Control,
    Down,
    Drain,
    OpenedUpdate,
    OpenUpdate,
    Outcomes,
    Pause,
    PushLive,
    Readiness,
    Recover,
    Restart,
    Resume,
    SaveWeights,
    Scale,
    Sleep,
    StatusQuery,
    TakenDown,
    Wake,
    Withdraw,
)
from skyctl.core.results import SavedWeights, WeightsState
from skyctl.core.saving import save_weights
from skyctl.core.status import (
    BY_DOWN,
    INTERRUPTED,
    FleetStatus,
    Operation,
    OperationKind,
)
from skyctl.core.urls import FleetUrls, access
from skyctl.core.verb_table import SETTLE_WAIT_S
from skyctl.errors import (
    ConflictError,
    FleetDownError,
    NotFoundError,
    ServerError,
    SkyctlError,
    UsageError,
)
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, OutcomeStatus
from skyctl.kill_points import reached
from skyctl.launch import DEFAULT as LAUNCHER
from skyctl.live.offer import Live, Offer, Offered
from skyctl.push.live_way import release_all, take_offer
from skyctl.push.request import PushRequest
from skyctl.push.senderless_delivery import ask_targets
from skyctl.push.trainer import Rendezvous, SendTarget, Trainer
from skyctl.push.verify import Verification
from skyctl.states import Phase
from skyctl.store.credentials import ensure_credentials
from skyctl.store.database import Retention
from skyctl.store.in_doubt import close_orphans, close_sender, held_by, in_doubt
from skyctl.store.journal import Job
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor import adapters, admission, healing, rolling, rollout
from skyctl.supervisor.canary import Canaries, push_ended, refuse, refuse_push
from skyctl.supervisor.fleet import report
from skyctl.supervisor.interface import Adopt, Begun, Reconcile, SupervisorService, Undo
from skyctl.supervisor.operations import OperatedFleet
from skyctl.supervisor.pushes import Pushes
from skyctl.supervisor.reconcile import Preview, preview
from skyctl.supervisor.replica import Replica, ReplicaContext
from skyctl.supervisor.scaling import Scaling, resized
from skyctl.supervisor.sleep_group import Member
from skyctl.supervisor.weights import bring_to_weights, none_copied
from skyctl.supervisor.wire import spec_hash

_RECOVERIES = 2  # one for what the first finds, one for what shows after it
_SETTLE_POLL_S = 0.05
_UNDONE = 20  # requests that were undone before they came


class Supervisor(OperatedFleet, SupervisorService):
    """All of one running fleet. `finished` ends the process."""

    def __init__(
        self, paths: FleetPaths, state: FleetState, client: ControlClient | None = None
    ) -> None:
        super().__init__(paths, state, client)
        self.finished = asyncio.Event()
        close_orphans(state)  # jobs of a dead supervisor, before anybody asks
        self.on_plan: Callable[[FleetPlan], None] = lambda plan: None
        self._gpu_locks: dict[tuple[str, int], asyncio.Lock] = {}
        self.pushes = Pushes(self, self.heal_after)
        self.canaries = Canaries(self, self._begin_push, self.begin_recovery)
        self.scaler = Scaling(self, self._take, self.pushes.warming)
        self.member = Member(self)
        self._undone: deque[str] = deque(maxlen=_UNDONE)

    # --- verbs ----------------------------------------------------------------------------------

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        """Asks the servers that are up, if `request.fresh`."""
        status = self.member.shown(await report(self, fresh=request.fresh))
        # an operation that has ended is reported even after the next has begun
        ended = self._ended(request.operation)
        return status if ended is None else replace(status, operation=ended)

    async def reconcile(self, request: Reconcile) -> Begun:
        """Raises ConflictError if something else is being done, or the request was undone."""
        if request.request_id in self._undone:
            raise ConflictError(f"{request.kind} was interrupted before it began")
        begun = self.change_to(
            request.plan, request.kind, parallel=request.parallel, undo=request.undo
        )
        if begun.operation and not begun.joined:
            self.begun_by = request.request_id
        return begun

    def change_to(
        self,
        plan: FleetPlan,
        kind: OperationKind = OperationKind.UP,
        *,
        parallel: int = 1,
        undo: bool = True,
    ) -> Begun:
        """Begin to bring the fleet to the plan. Raises ConflictError."""
        running = self._operation_task is not None and not self._operation_task.done()
        if running and self.operation and self.plan and _same(plan, self.plan):
            return Begun(self.operation.id, joined=True)
        self._refuse_while_busy()
        if (canary := self.state.canary()) is not None:
            refuse(plan, canary)
        # read now: one that is refused meanwhile takes its place
        file = self._read_file() if kind is OperationKind.UP else None
        if self.plan is not None and not self.changes(plan):
            self._take(plan)
            self._keep_applied(file)
            return Begun(0)
        if self.plan is not None:
            self.member.require_awake()
        before = self.plan
        with self.state.durable():  # no process is started that could not be put on record
            self.state.set("going_down", "")
        detail = "" if before is None else str(self.changes(plan))
        self._take(plan)
        return Begun(self._begin(kind, detail, self._bring_to(plan, before, parallel, undo, file)))

    async def _bring_to(
        self,
        plan: FleetPlan,
        before: FleetPlan | None,
        parallel: int,
        undo: bool,
        file: bytes | None,
    ) -> None:
        self.before = before
        if before is None:
            await healing.adopt(self, self.pushes, plan)
        try:
            await rolling.apply_plan(self, plan, parallel=parallel, undo=undo)
        except SkyctlError:
            self.take_in_force()
            raise
        self.before = None
        self._keep_applied(file)

    def take_in_force(self) -> None:
        """After a change that was not completed: what runs is the plan, and not the new one."""
        if self.before is not None:
            self._take(rolling.in_force(self, self.before))
            with self._reporting_unkept():
                restore_applied(self.paths)

    def _read_file(self) -> bytes | None:
        with self._reporting_unkept():
            return self.paths.fleet_file.read_bytes()
        return None

    def _keep_applied(self, file: bytes | None) -> None:
        if file is not None:
            with self._reporting_unkept():
                keep_applied(self.paths, file)

    @contextmanager
    def _reporting_unkept(self) -> Iterator[None]:
        """The fleet file is read, kept or restored; the fleet itself needs none of it."""
        try:
            yield
        except (OSError, SkyctlError) as error:
            self.state.add_event("fleet", f"the fleet file in force was not kept: {error}")

    async def preview(self, request: Reconcile) -> Preview:
        return preview(request.plan, self.changes(request.plan), self.state.processes())

    async def adopt(self, request: Adopt) -> int:
        """What lives is left alone, even where it differs from the plan. 0: this supervisor already
        has a plan.
        """
        if self.plan is not None:
            return self.operation.id if self.operation is not None else 0
        self._take(request.plan)
        work = healing.take_over(self, self.pushes, request.plan)
        return self._begin(OperationKind.ADOPT, "", work)

    async def scale(self, request: Scale) -> int:
        while True:
            before = self.require_plan()
            scale = before.config.scale
            if scale is not None and (reason := scale.refusal(request.replicas)):
                hint = "change the file, then: skyctl up"
                raise UsageError(f"cannot scale to {request.replicas}: {reason}", hint=hint)
            plan = await asyncio.to_thread(resized, self, request.replicas)
            if self.plan is before:  # else it would undo what was taken meanwhile
                return self.change_to(plan, OperationKind.SCALE).operation

    async def findings(self) -> tuple[Finding, ...]:
        self.require_plan()
        return tuple(await healing.find(self))

    async def recover(self, request: Recover = Recover()) -> tuple[Recovered, ...]:
        """Runs once verbs under way have ended. A second recovery joins the first."""
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        done: dict[str, Recovered] = {}
        for _ in range(_RECOVERIES):
            await self._until_ended(self.begin_recovery(), deadline)
            done |= {
                repair.server: repair
                for repair in self.recovered
                if repair.action.needed or repair.server not in done
            }
            if all(not repair.action.needed for repair in await self.findings()):
                break
        return tuple(done.values())

    def begin_recovery(self) -> int:
        """Begin to repair what is wrong, once verbs under way have ended; returns the operation's
        number. A second call joins the first.

        Raises:
            ConflictError: something else is being done.
        """
        self.require_plan()
        if (operation := self.under_way) and operation.kind.repairs:
            return operation.id
        self._refuse_while_busy()
        self.member.require_awake()
        return self._begin(OperationKind.RECOVER, "", healing.heal_in_turn(self, self.pushes))

    def heal_after(self, job: Job, turn: Turn) -> bool:
        """Begin to repair what a push of ours left in doubt, and release its turn when done.

        False: there is nothing to do, or something else is being done.
        """
        needed = push_ended(self.state, job) or in_doubt(self.state)
        if self.under_way or self.push_job or self.draining or not needed:
            return False
        turn.rename(f"recovery after {job.id}")
        self._begin(OperationKind.RECOVER, f"after {job.id}", healing.heal(self, self.pushes))
        assert self._operation_task is not None  # just begun
        self._operation_task.add_done_callback(lambda task: turn.release())
        self._operation_task.add_done_callback(lambda task: self.changed())
        return True

    async def restart(self, request: Restart = Restart()) -> int:
        chosen = self.named(request.servers)
        self._refuse_while_busy()
        self.member.require_awake()
        detail = ", ".join(replica.name for replica in chosen)
        return self._begin(OperationKind.RESTART, detail, rolling.restart_rolling(self, chosen))

    async def urls(self) -> FleetUrls:
        plan, metrics = self.require_plan(), None
        trainer = plan.config.trainer
        if plan.router is not None:
            host = urlsplit(plan.router.url).hostname or "127.0.0.1"
            metrics = local_url(host, plan.router.metrics_port)
        return FleetUrls(
            name=plan.name,
            model=plan.served_model_name,
            router=plan.router.url if plan.router is not None else None,
            servers={replica.name: replica.spec.url for replica in self.replicas.values()},
            router_metrics=metrics,
            access=access(plan.config, self.paths),
            engine=plan.config.engine,
            routed=rollout.takes_requests(self),
            trainer=local_url(trainer.host, trainer.port) if trainer is not None else None,
        )

    async def model_path(self) -> str | None:
        return self.state.weights().checkpoint or self.require_plan().base

    async def weights(self) -> WeightsState:
        state, plan = await super().weights(), self.plan
        if plan is None:
            return state
        # a file system that hangs must not hold up the other verbs
        base = await asyncio.to_thread(admission.started_with, plan)
        return replace(state, base=base, base_digest=admission.base_digest(self.state, plan))

    async def verify_weights(self) -> Verification:
        targets = [r.target for r in self.named(()) if r.phase is Phase.UP]
        return await verify_servers(targets, self.state.servers(), self.client, self.state)

    async def save_weights(self, request: SaveWeights) -> SavedWeights:
        near = [r for r in self.named(()) if r.phase is Phase.UP and r.spec.node is None]
        with await self.arbiter.turn(
            Act.VERB, f"skyctl weights save {request.directory}", servers=self.urls_of(near)
        ):
            return await save_weights(
                request,
                [replica.target for replica in near],
                base=self.require_plan().base,
                state=self.state,
                client=self.client,
            )

    async def undo(self, request: Undo) -> None:
        if request.request_id == self.begun_by:
            await self.undo_by(INTERRUPTED)
            return
        self._undone.append(request.request_id)  # which may be under way
        if not self.replicas and self.under_way is None:
            await self.down(Down(0.0))

    async def undo_by(self, reason: str) -> None:
        stopped = await self._stop_operation(reason)
        if not stopped and self.operation is not None and self.operation.error:
            await self.put_back()  # it has failed; what has succeeded meanwhile stays
        if not self.replicas:
            await self.down(Down(0.0))

    async def down(self, request: Down = Down()) -> TakenDown:
        """Drain, stop the fronts and then every server, and end the supervisor. Idempotent."""
        drain_timeout_s = request.drain_timeout_s
        if drain_timeout_s is None:
            drain_timeout_s = self.plan.config.drain_timeout_s if self.plan is not None else 0.0
        names = tuple(row.name for row in self.state.processes() if row.alive())
        await self._stop_operation(BY_DOWN)
        # before the push is stopped: what it leaves in doubt is no longer repaired
        self.operation = Operation(next(self._numbers), OperationKind.DOWN, "", time.time())
        await self.scaler.stop()
        await self.pushes.stop()
        self.state.set("going_down", "1")  # after a death midway, the next one goes on with it
        reached("down.begin")
        try:
            await self.pushes.close()
            await rollout.take_down(self, drain_timeout_s)
        finally:
            self.finished.set()
        return TakenDown(names, supervised=True)

    async def control(self, request: Control) -> Outcomes:
        act, servers = Act.of_verb(request.verb), self.urls_of(self.named(request.servers))
        async with contextlib.AsyncExitStack() as stack:
            if act is Act.SLEEP:
                await stack.enter_async_context(self.pushes.copying.aside())
            activity = f"skyctl {request.verb}"
            stack.enter_context(await self.arbiter.turn(act, activity, servers=servers))
            if isinstance(request, Wake):
                self.member.require_awake()
            if isinstance(request, Sleep):
                await stack.enter_async_context(none_copied(self.named(request.servers)))
            if isinstance(request, Sleep) and request.hands_to:
                self._refuse_operation()
                outcomes = await self.member.hand_over(request, self._control_in_turn)
                await self.pushes.senders.close()  # an idle one has memory of a GPU
                return outcomes
            return await self._control_in_turn(request)

    async def _control_in_turn(self, request: Control) -> Outcomes:
        plan = self.require_plan()
        everyone = self.named(request.servers)
        chosen = [replica for replica in everyone if replica.phase is Phase.UP]
        if isinstance(request, Wake):  # what starts has lost no weights; what is adopted may have
            adopted = (r.row for r in everyone if r.phase is not Phase.UP and r.adopted)
            verbs.refuse_discarded(adopted, request.tags, plan.device)
        absent = {r.name: self._meant_for(request, r) for r in everyone if r.phase is not Phase.UP}
        if isinstance(request, Sleep):
            await self.pushes.warming.stop()  # a rehearsal must not read weights that are asleep
        if isinstance(request, Pause | Sleep) and len(chosen) < len(self.replicas):
            # out of the router before it freezes, so that no request waits behind it
            self.freezing |= {replica.name for replica in chosen}
            await rollout.sync_router(self)
        self.verbs_under_way += 1
        try:
            outcomes = await verbs.run(
                request,
                [replica.target for replica in chosen],
                client=self.client,
                state=self.state,
                timeout_s=plan.config.control_timeout_s,
                device=plan.device,
            )
            admission.reload_rows(chosen, self.state)
            await self._see(request, chosen, outcomes)
        finally:
            self.verbs_under_way -= 1
            self.freezing -= {replica.name for replica in chosen}
            if self.router is not None and self.router.workers != set(self.desired().values()):
                await rollout.sync_router(self)
        by_name = {outcome.server: outcome for outcome in outcomes}
        return tuple(by_name.get(r.name) or absent[r.name] for r in everyone)

    async def _see(self, request: Control, replicas: Sequence[Replica], outcomes: Outcomes) -> None:
        """Update whether each is paused: from the verb if that settles it, otherwise by asking."""
        tells = isinstance(request, Pause | Resume)
        reported = {outcome.server for outcome in outcomes if outcome.ok} if tells else set()
        unknown = [replica for replica in replicas if replica.name not in reported]
        await admission.refresh_all(unknown, self.client, 5.0)
        for replica in replicas:
            if replica.name in reported:
                replica.observe(paused=isinstance(request, Pause))

    async def start_push(self, request: PushRequest) -> str:
        """Push into every server that is up."""
        if request.servers:
            hint = "skyctl canary start CKPT --share 10%"
            raise UsageError("a push into some servers is a canary's", hint=hint)
        return (await self._begin_push(request)).id

    async def open_update(self, request: OpenUpdate) -> OpenedUpdate:
        transfer = self.require_plan().config.weight_transfer
        trainer = Trainer(
            request.at, request.process, request.timeout_s or transfer.update_timeout_s
        )
        job = await self._begin_push(request.push, trainer)
        servers = await self.pushes.opened(trainer)
        if await hung_up.get()():
            close_sender(self.state, job.id)
            trainer.report("the client of the update has gone meanwhile")
        holder = next((replica.target.holder for replica in self.replicas.values()), "")
        return OpenedUpdate(job.id, servers, holder)

    async def close_update(self, request: CloseUpdate) -> None:
        """Called after the push has ended, it releases the servers that waited for it."""
        holder, trainer = held_by(self.state), self.pushes.trainer
        close_sender(self.state, request.job)
        if trainer is not None and self.push_job is not None and self.push_job.id == request.job:
            trainer.report(request.failure, request.version, passed_on=request.passed_on)
        elif holder is not None and held_by(self.state) is None:
            with contextlib.suppress(SkyctlError):  # turn is taken: `skyctl recover` does it later
                self.begin_recovery()

    async def canary(self, request: CanaryRequest = CanaryRequest()) -> CanaryStatus:
        self.require_plan()
        return await self.canaries.act(request)

    async def drain(self, request: Drain = Drain()) -> Readiness:
        self.require_plan()
        with self.state.durable():
            self.state.set_drained(request.on)
        self.state.add_event("fleet", "drained" if request.on else "no longer drained")
        return self.readiness()

    def readiness(self) -> Readiness:
        """Whether load balancers in front are to send requests."""
        if self.state.drained:
            return Readiness(False, "drained")
        return Readiness(True) if self.routed() else Readiness(False, "no server takes requests")

    async def offer(self, request: Offer) -> Offered:
        self.require_plan()
        self._refuse_beside_operation()
        self.member.require_awake()
        await self.pushes.copying.over()
        with await self.arbiter.turn(Act.PUSH, "a trainer's offer"):
            await self.pushes.warming.stop()  # workers that are asked release what it mapped
            live = await take_offer(request, self.pushes.would_take(), self.client)
            self.pushes.offers = {live.key: live}
        return live.offered(unkept=await self.pushes.copying.unkept())

    async def push_live(self, request: PushLive) -> str:
        live = self.pushes.offers.get(request.key)
        if live is None:
            raise NotFoundError("the trainer's offer is not known any more", hint="offer it again")
        live = live.with_push(request.numbers, request.group, forms=request.forms)
        return (await self._begin_push(request.push, live=live)).id

    async def withdraw(self, request: Withdraw) -> None:
        if self.pushes.offers.pop(request.key, None) is not None:
            # workers let go of memory, and no weights change: a copy may go on
            with await self.arbiter.turn(Act.VERB, "the end of a trainer"):
                await self.pushes.warming.stop()
                await release_all(self.pushes.would_take(), self.client)

    async def rendezvous(self, request: Rendezvous) -> tuple[SendTarget, ...]:
        return await ask_targets(self.pushes.would_take(), request, self.client)

    async def _begin_push(
        self,
        request: PushRequest,
        trainer: Trainer | None = None,
        live: Live | None = None,
        check: Callable[[], None] | None = None,
    ) -> Job:
        """`check` raises if the canary, of which each wait may have made another, refuses it."""
        check = check or partial(refuse_push, self.state)
        self.require_plan()
        check()
        await self.pushes.copying.over()
        until = time.monotonic() + SETTLE_WAIT_S
        while self._settles() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_SETTLE_POLL_S)
        await self.pushes.copying.over()  # of the push that was settled
        self._refuse_beside_operation()
        if request.keep and not request.checkpoint:
            await self.pushes.copying.require()
        request = await asyncio.to_thread(jobs.resolved, request)
        if request.checkpoint and any(spec.node for spec in self.require_plan().servers):
            await asyncio.to_thread(refuse_unseen, self.require_plan(), request, self.paths)
        servers = self.urls_of(self.replicas.values())
        turn = await self.arbiter.turn(Act.PUSH, "a push that is just starting", servers=servers)
        try:
            if await hung_up.get()():  # its directory may hold another version by now
                raise ConflictError("the client of the push has gone meanwhile")
            await self.pushes.warming.stop()
            self._refuse_beside_operation()
            self.member.require_awake()
            check()
            return self.pushes.start(request, turn, trainer, live)
        except BaseException:
            turn.release()
            raise

    # --- internals ------------------------------------------------------------------------------

    def _note_states(self) -> None:
        super()._note_states()
        self.pushes.copying.begin_if_due()
        self.pushes.warming.begin_if_due()

    def _take(self, plan: FleetPlan) -> None:
        """Make this the plan; changed policies apply from now on. Raises FleetDownError."""
        if self.finished.is_set():
            raise FleetDownError(f"the supervisor of fleet {self.paths.name} is ending")
        self._refuse_another_place(plan)
        place_copies(self.paths, self.state, plan.config.shared_dir)
        self.plan = plan
        if self._context is None:
            self._context = ReplicaContext(
                state=self.state,
                paths=self.paths,
                client=self.client,
                config=lambda: self.require_plan().config,
                credentials=ensure_credentials(self.paths),
                admit=self._admit,
                admitted=self._admitted,
                gate=self._gate,
                changed=self.changed,
                pushing=lambda: not self.pushes.over.is_set(),
                unanswering=self.unanswering,
                asleep_because=self.member.asleep_because,
            )
        self.state.retention = Retention(**plan.config.history.model_dump())
        self.on_plan(plan)
        # before anything is spawned: another `up` plans with the same ports
        self.state.set("ports", json.dumps(ports_of(plan)))
        self.state.set("pins", json.dumps(plan.pins))
        admission.record_files(self.state, plan)

    def _refuse_another_place(self, plan: FleetPlan) -> None:
        """Only the launcher that started a process can end it; and a fleet that changed its group
        would be awake in both.
        """
        config = plan.config
        places = {"launcher": (config.launcher, LAUNCHER), "sleep_group": (config.sleep_group, "")}
        for key, (value, default) in places.items():
            before, new = self.state.get(key) or default, value or default
            if before != new and self.state.processes():
                raise ConflictError(
                    f"the fleet's processes were started with {key} {before!r}, not {new!r}",
                    hint="bring it down first: skyctl down && skyctl up",
                )
            if before != new:
                self.state.set(key, new)

    def _meant_for(self, request: Control, replica: Replica) -> Outcome[None]:
        """The outcome of a verb for a replica that is not running; pauses are remembered for it."""
        doubted = in_doubt(self.state).get(replica.name)
        if reason := verbs.pointless(request, replica.row, doubted):
            return Outcome(replica.name, OutcomeStatus.SKIPPED, 0.0, reason)
        detail = f"not running ({replica.state})"
        if isinstance(request, Pause | Resume):
            with self.state.transaction():
                replica.update_row(paused=isinstance(request, Pause))
                verbs.count(self.state)
            replica.intent_changed = True
            replica.resume_when_up = isinstance(request, Resume)
            if not replica.phase.ended:
                detail = f"{replica.state}; will be {request.verb}d when it is ready"
        elif isinstance(request, Wake) and not request.tags and replica.row.sleep_level:
            replica.update_row(sleep_level=0, weights_awake=False)
            replica.intent_changed = replica.asleep = True  # one that is adopted sleeps on
            if not replica.phase.ended:
                detail = f"{replica.state}; will be awake when it is ready"
        return Outcome(replica.name, OutcomeStatus.SKIPPED, 0.0, detail)

    def _refuse_while_busy(self) -> None:
        self._refuse_operation()
        self.arbiter.take(Act.VERB, "a check").release()

    def _settles(self) -> bool:
        """Whether what lives is still being adopted or repaired, or servers are being asked how a
        push that has ended left them.
        """
        operation = self.under_way
        if operation is None:
            job = self.push_job
            return job is not None and self.state.journal.job(job.id).ended
        return operation.kind is OperationKind.RECOVER or (
            operation.kind is OperationKind.ADOPT and not self.taken_over
        )

    def _refuse_beside_operation(self) -> None:
        """Raise ConflictError if an operation excludes a push."""
        adopting = self.operation is not None and self.operation.kind is OperationKind.ADOPT
        # servers that still start take the fleet's weights when ready
        if not (adopting and self.taken_over):
            self._refuse_operation()

    def _refuse_operation(self) -> None:
        if operation := self.under_way:
            activity = f"{operation.kind} {operation.detail}".strip()
            hint = "follow it: skyctl status --watch"
            if operation.kind.undoable:
                hint += f"; or cancel it: skyctl jobs cancel {operation.job}"
            raise ConflictError(
                f"fleet {self.paths.name} is busy: {activity}",
                hint=hint,
                details={"operation": operation.kind},
            )

    async def _admit(self, replica: Replica) -> None:
        """Between ready and routed: the fleet's weights, then its adapters and intent."""
        plan, slept = self.require_plan(), replica.asleep
        if slept:
            await admission.wake(replica, self.client)
        # a push that is under way quarantines its predecessor, and forgets that in the end
        while await self.pushes.over.wait() and not replica.row.quarantine:
            if replica.reached_by_push:
                raise ServerError(f"{replica.reached_by_push} failed, and had reached it by then")
            if not replica.compared:
                await self._pin_downloaded()
                await admission.compare_with_base(replica, self.state, plan, self.client)
                continue
            if admission.is_current(self.state, replica):
                break
            weights = self.state.weights_of(replica.name)
            if weights.version is None:
                raise ServerError("it took the weights of a canary that has ended meanwhile")
            self.state.add_event(replica.name, f"taking weight version {weights.version}")
            await bring_to_weights(replica, self)
        # a server that slept may have adapters that the fleet has no more
        if not replica.row.quarantine and (slept or not adapters.is_current(self, replica)):
            await adapters.admit(self, replica)
        await admission.apply_intent(replica, self.client, plan.config.control_timeout_s)

    async def _pin_downloaded(self) -> None:
        """Pin models that servers have just downloaded, for those that start later."""
        plan = self.require_plan()
        pins = await asyncio.to_thread(pin, plan.config, plan.base_dir, os.environ, plan.pins)
        if all(name in plan.pins or os.path.isabs(name) for name in pins):  # noqa: PTH117
            return
        has = {"router": plan.router is not None, "tinker": plan.tinker is not None}
        ports = ports_of(plan)
        pinned = await asyncio.to_thread(
            planned, plan.config, plan.base_dir, ports, pins=pins, **has
        )
        if self.plan is not plan:  # another was taken meanwhile
            return
        self._take(pinned)
        for spec in pinned.servers:
            replica = self.replicas.get(spec.name)
            if replica is not None and spec_hash(replica.planned) == spec_hash(spec):
                replica.planned = spec

    def _admitted(self, replica: Replica) -> bool:
        if replica.row.quarantine:
            return True
        current = admission.is_current(self.state, replica) and adapters.is_current(self, replica)
        return current and self.pushes.over.is_set() and not replica.intent_changed

    @asynccontextmanager
    async def _gate(self, spec: ServerSpec) -> AsyncIterator[None]:
        """One start at a time per GPU: concurrent memory profiling of two servers fails."""
        async with AsyncExitStack() as stack:
            for gpu in sorted(spec.gpus):
                which = (spec.node.target if spec.node else "", gpu)
                await stack.enter_async_context(self._gpu_locks.setdefault(which, asyncio.Lock()))
            yield


def _same(plan: FleetPlan, other: FleetPlan) -> bool:
    def hashes(plan: FleetPlan) -> list[str]:
        specs = (*plan.servers, plan.router, plan.tinker)
        return [spec_hash(spec) if spec else "" for spec in specs]

    same = config_digest(plan.config) == config_digest(other.config)
    return same and hashes(plan) == hashes(other)
