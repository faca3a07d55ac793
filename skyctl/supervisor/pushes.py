"""The push jobs of a supervisor: one at a time, into the replicas that are up, which leave the
router for it and rejoin; and the rehearsal of the next push (`push/rehearsal.py`), as soon as all
servers are up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from skyctl.checkpoints.compat import reference
from skyctl.checkpoints.staging import sweep
from skyctl.core import jobs
from skyctl.core.arbiter import Turn
from skyctl.core.guardian import guarded
from skyctl.core.plan import FleetPlan
from skyctl.core.repeated import needed
from skyctl.core.tinker import LABEL_PREFIX
from skyctl.errors import ConflictError, SkyctlError
from skyctl.live.offer import Live
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.trainer import CANCELLED, SendTarget, Trainer
from skyctl.states import Phase, PushState, ReplicaState
from skyctl.store.in_doubt import in_doubt, refuse_held
from skyctl.store.journal import Job, JobEvent
from skyctl.supervisor import admission
from skyctl.supervisor.admission import committed, refresh_all, reload_rows
from skyctl.supervisor.copying import Copying
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.rollout import sync_router
from skyctl.supervisor.warming import Warming
from skyctl.transfer.sender_pool import SenderPool

_LOG = logging.getLogger(__name__)
_UNDO_TIMEOUT_S = 5.0
_ABANDON_TIMEOUT_S = 1.0
_ASK_TIMEOUT_S = 5.0


class Pushes:
    """`over` is set while no push is under way (`RunningFleet.push_job`). `trainer` sends the
    push's weights if skyctl does not. `offers` has what a trainer offered last. `heal_after` is
    called with each push that ended and its turn, and returns whether it takes over releasing the
    turn.
    """

    def __init__(self, running: RunningFleet, heal_after: Callable[[Job, Turn], bool]) -> None:
        self.trainer: Trainer | None = None
        self.offers: dict[str, Live] = {}
        self._live: Live | None = None
        self._repairs = self._cancelled = False
        self.over = asyncio.Event()
        self.over.set()
        self._running = running
        self._heal_after = heal_after
        self._task: asyncio.Task[None] | None = None
        self.senders = SenderPool()
        self.warming = Warming(running, self.senders)
        self.copying = Copying(running)

    def start(
        self,
        request: PushRequest,
        turn: Turn,
        trainer: Trainer | None = None,
        live: Live | None = None,
    ) -> Job:
        """Begin a push into every server that is up; returns the job, which releases the turn at
        its end. A `trainer` sends its weights, or they are `live` in its memory.

        Raises:
            ConflictError: no server can take one, or another trainer may still send to some.
            StateUnwritable: it cannot be put on record; nothing was touched.
        """
        up = self._chosen(request)
        refuse_held(self._running.state, trainer.process if trainer else None)
        self.trainer, self._live = trainer, live
        try:
            return self._open(request, up, turn, heals=True)
        except BaseException:
            self.trainer = self._live = None
            raise

    def _chosen(self, request: PushRequest) -> list[Replica]:
        """The servers of this push. Raises ConflictError if there is none, or if one of a canary's
        cannot take it.
        """
        able = self._able()
        chosen = [r for r in able if not request.servers or r.name in request.servers]
        if missing := {*request.servers} - {replica.name for replica in chosen}:
            raise ConflictError(
                f"{', '.join(sorted(missing))} cannot take a push", hint="look: skyctl status"
            )
        return chosen

    async def opened(self, trainer: Trainer) -> tuple[SendTarget, ...]:
        """`Trainer.targets` of the push that was just started for it."""
        assert self._task is not None
        return await trainer.targets(self._task)

    def would_take(self) -> PushFleet:
        """The servers a push would go to now. Raises ConflictError if there is none."""
        return self._fleet(self._running.require_plan(), self._able(), dry_run=False)

    def _able(self) -> list[Replica]:
        """The servers that a push goes to.

        Of quarantined servers only those that wait for weights take part: what they hold is
        unknown, or is not the fleet's, and a push repairs that.

        Raises:
            ConflictError: there is none.
        """
        running = self._running
        plan, doubts = running.require_plan(), in_doubt(running.state)
        up = [
            replica
            for replica in self._up()
            if not replica.row.quarantine
            or replica.name in doubts
            or replica.row.weight_version is None
        ]
        if not up:
            raise ConflictError(
                f"no server of fleet {plan.name} can take a push", hint="look: skyctl status"
            )
        return up

    def _up(self) -> list[Replica]:
        """The servers that are up, without those whose settings are not their siblings': a push
        does not repair settings.
        """
        apart = self._running.state.expected.other_settings()
        replicas = self._running.replicas.values()
        return [r for r in replicas if r.phase is Phase.UP and r.name not in apart]

    async def again(self, request: PushRequest, servers: Collection[str]) -> Job:
        """A push as part of recovery, under its turn: into those of these servers that are up, in
        doubt or not. Returns the ended job.

        Raises:
            StateUnwritable: it cannot be put on record.
        """
        running = self._running
        await self.warming.stop()
        doubts = in_doubt(running.state)
        up = [r for r in self._up() if r.name in servers]
        up = [r for r in up if r.name in doubts or not r.row.quarantine]
        job = self._open(request, up, Turn(None), heals=False)
        await self.over.wait()
        return running.state.journal.job(job.id)

    async def cancel(self, job: Job) -> None:
        """Ask the push under way to end: before its first byte it is undone, later it completes.
        Asked again, it goes on with that.

        Raises:
            ConflictError: it is part of a recovery.
        """
        await asyncio.sleep(0)  # a task that never ran would end nothing
        task = self._task
        if self._repairs:
            raise ConflictError(
                f"{job.id} repairs what another push left: it cannot be cancelled",
                hint=f"follow it: skyctl jobs wait {job.id}",
            )
        if task is None or task.cancelling():
            return
        self._cancelled = True
        if self.trainer is not None:
            self.trainer.report(CANCELLED)
        task.cancel()

    async def stop(self) -> None:
        """End a push where it is: its servers are about to be stopped. Before its first byte it is
        undone; after it, the first cancellation only asks it to complete.
        """
        await self.warming.stop()
        await self.copying.stop("the fleet went down meanwhile")
        if self.trainer is not None:
            self.trainer.report("the fleet is taken down")
        task, patience_s = self._task, _UNDO_TIMEOUT_S
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=patience_s)
            patience_s = _ABANDON_TIMEOUT_S

    async def close(self) -> None:
        """End the sender that is kept between pushes."""
        await self.warming.stop()
        await self.senders.close()

    def _open(self, request: PushRequest, up: Sequence[Replica], turn: Turn, *, heals: bool) -> Job:
        running, plan = self._running, self._running.require_plan()
        journal = running.state.journal
        job = jobs.open_push(journal, turn, request)
        absent = [r for r in running.replicas.values() if r not in up]
        if absent:
            names = ", ".join(f"{replica.name} ({replica.state})" for replica in absent)
            journal.add_events(job.id, JobEvent.note(f"not part of this push: {names}"))
        ours = (request.weight_version or "").startswith(LABEL_PREFIX)
        if running.tinker is not None and not ours and request.checkpoint != plan.base:
            note = (
                f"the Tinker API goes on training {plan.base}; its adapters are sampled over this"
            )
            journal.add_events(job.id, JobEvent.note(note))
        for replica in absent:
            if replica.phase is not Phase.UP:
                replica.hold()
        running.push_job = job
        self._repairs, self._cancelled = not heals, False
        self.over.clear()
        if request.keep and not request.checkpoint:
            self.copying.follow(job)
        work = self._run(job, request, plan, up, turn, heals)
        self._task = asyncio.create_task(work, name=job.id)
        return job

    async def _run(
        self,
        job: Job,
        request: PushRequest,
        plan: FleetPlan,
        up: Sequence[Replica],
        turn: Turn,
        heals: bool,
    ) -> None:
        running = self._running
        state = running.state
        try:
            try:
                await self._push(job, request, plan, up)
            except asyncio.CancelledError:
                if not self._cancelled:  # the fleet is taken down
                    raise
            await admission.refresh_all(up, running.client, 5.0)
        finally:
            running.push_job = self.trainer = self._live = None
            self.over.set()
            if not (heals and self._heal_after(job, turn)):
                turn.release()
                self.copying.begin_if_due()
            running.changed()  # the push may have stopped a rehearsal
        keep = state.checkpoints() | needed(state)
        await asyncio.to_thread(sweep, running.paths.staging, keep)

    async def _push(
        self, job: Job, request: PushRequest, plan: FleetPlan, up: Sequence[Replica]
    ) -> None:
        running = self._running
        state, client = running.state, running.client
        instances = {replica.name: replica.instance for replica in up}
        if request.rolling:  # one that leaves by scaling comes first: it then serves for the others
            up = sorted(up, key=lambda replica: replica.name not in running.held_out)
        try:
            await jobs.run_push(
                job,
                request,
                replace(
                    self._fleet(plan, up, dry_run=request.dry_run),
                    trainer=self.trainer,
                    live=self._live,
                ),
                client=client,
                state=state,
                senders=self.senders,
                rotation=RouterRotation(running) if running.router else None,
                on_server=self._on_server,
                on_part=lambda: reload_rows(up, running.state),
                guardian=guarded(running.paths),
                kept=running.paths.kept,
            )
        except (Exception, asyncio.CancelledError) as error:
            # a push that fails records that itself: this one never began
            jobs.abandon(state, job.id, error)
            raise
        finally:
            for replica in up:
                replica.in_push = False
                replica.reload_row()
                if instances[replica.name] != replica.instance:
                    # it died meanwhile: what the push reports is about a process that is gone, or
                    # about its successor, which may hold anything, and may be paused
                    if replica.name in in_doubt(state):
                        replica.reached_by_push = job.id
                    replica.forget_weights()
                    replica.resume_when_up = True

    def _fleet(self, plan: FleetPlan, up: Sequence[Replica], *, dry_run: bool) -> PushFleet:
        state = self._running.state
        return admission.push_fleet(
            plan,
            up,
            state,
            reference(plan.base, state.weights().checkpoint),
            committed(state, plan),
            state.journal.pushes() if dry_run else (),
        )

    def _on_server(self, name: str, state: str, detail: str) -> None:
        replica = self._running.replicas.get(name)
        if replica is None:
            return
        if state == PushState.QUARANTINED:
            replica.update_row(quarantine=detail or "its push failed")
        replica.in_push = PushState(state).shown_as_updating
        self._running.changed()


class RouterRotation:
    """See `push.run.Rotation`. Servers are held out by name, whatever their state."""

    def __init__(self, running: RunningFleet) -> None:
        self._running = running

    async def take_out(
        self, names: Collection[str], *, others_serve: bool, closed: bool = False
    ) -> None:
        """Take these servers out; returns once the router lists none of them. `closed`: their
        guards refuse users who ask them directly.

        Raises:
            SkyctlError: the router does not answer, or is not there; or no other server would be
                left although `others_serve`. They are in it as before.
        """
        running = self._running
        router = running.router
        if router is None or router.phase is not Phase.READY:
            state = "not there" if router is None else router.state
            raise SkyctlError(f"the router is {state}", hint="skyctl status")
        await router.sync()  # servers that rejoined are in it before others leave
        out = running.held_out | set(names)
        ready = [
            replica for replica in running.replicas.values() if replica.state is ReplicaState.READY
        ]
        if others_serve and all(replica.name in out for replica in ready):
            raise SkyctlError("no other server is ready to serve meanwhile", hint="skyctl status")
        running.held_out = out
        await router.sync()
        urls = {running.replicas[name].spec.url for name in names}
        if still_routed := urls & router.workers:
            raise SkyctlError(
                f"the router still sends requests to {', '.join(sorted(still_routed))}"
            )
        if closed:
            for name in names:
                running.replicas[name].close()
            await self._seen(names)

    async def _seen(self, names: Collection[str]) -> None:
        """Wait until these servers are closed, or open, where they run.

        Raises:
            SkyctlError: the machine of one does not confirm it.
        """
        replicas = self._running.replicas
        processes = [replicas[name].process for name in names if name in replicas]
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                await asyncio.gather(*(process.settled() for process in processes if process))
        except TimeoutError as error:
            raise SkyctlError(f"the machines of {', '.join(names)} do not answer") from error

    async def rejoin(self, names: Collection[str]) -> None:
        """Route to these servers again, as far as their states allow. They are asked now: the last
        probe may have seen the push's own pause.
        """
        running = self._running
        replicas = [running.replicas[name] for name in names if name in running.replicas]
        for replica in replicas:
            replica.open_again()
        # a server whose machine does not confirm that it is open is routed to once it does
        await asyncio.gather(*(replica.wait_confirmed() for replica in replicas))
        await refresh_all(replicas, running.client, _ASK_TIMEOUT_S)
        running.held_out -= set(names)
        await sync_router(running)
