"""A fleet that skyctl did not start: the same verbs, sent straight to its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from skyctl.core import verbs
from skyctl.core.arbiter import Act, Turn
from skyctl.core.diagnosis import assess, stopped
from skyctl.core.recorded import RecordedFleet
from skyctl.core.registry import FleetRef, remember, supervisor_running
from skyctl.core.requests import (
    CancelJob,
    CloseUpdate,
    Control,
    LogQuery,
    OpenedUpdate,
    OpenUpdate,
    Outcomes,
    PushLive,
    Recover,
    Resume,
    SaveWeights,
    Staging,
    StatusQuery,
    Wake,
    Withdraw,
)
from skyctl.core.results import SavedWeights, WeightsState
from skyctl.core.status import FleetStatus
from skyctl.core.urls import FleetUrls, access
from skyctl.core.verb_table import Q, R, Verb
from skyctl.errors import ConflictError, NotFoundError, StateUnwritable, UsageError, no_server
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.trainer import CANCELLED, Trainer
from skyctl.service import attached_status
from skyctl.service.attached_servers import AttachedServers
from skyctl.states import ReplicaState
from skyctl.store.adapters import served
from skyctl.store.database import Retention
from skyctl.store.in_doubt import close_orphans, close_sender, in_doubt, refuse_held
from skyctl.store.server_locks import ServerLocks
from skyctl.store.state import FleetState
from skyctl.store.unrecorded import LOST, Unrecorded

if TYPE_CHECKING:
    from skyctl.adapters.fleet import AdapterChange, AdapterFleet
    from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
    from skyctl.core.findings import Finding
    from skyctl.core.recovery import Recovered
    from skyctl.live.offer import Live, Offer, Offered
    from skyctl.push.trainer import Rendezvous, SendTarget, Trainer
    from skyctl.push.verify import Verification

_WATCHED_S = 5.0
"""How long discovered servers are reused for `status`: `top` and `wait` poll it."""


class AttachedFleet(RecordedFleet):
    """Servers by URL, named `<fleet>-0`, `-1`, … in the order in which the fleet file first listed
    them; if the file says how to discover them, they are discovered again before each verb.

    Pushes run in this process: `start_push` begins one and `wait_job` must be awaited in the same
    `connect` block, or the push is cancelled when the block ends.
    """

    def __init__(self, ref: FleetRef, *, client: ControlClient | None = None) -> None:
        super().__init__(ref.paths)
        self.ref = ref
        self._client = client or ControlClient()
        self._pushes: dict[str, asyncio.Task[None]] = {}
        self._trainers: dict[str, Trainer] = {}
        self._offers: dict[str, Live] = {}

    @property
    def server_locks(self) -> ServerLocks:
        # what a push left in servers without skyctl's guard, no other fleet may thaw
        return ServerLocks(self.paths, lambda: in_doubt(self.state))

    @property
    def targets(self) -> tuple[ServerTarget, ...]:
        """The servers as they were last located."""
        return self._servers.targets

    async def __aenter__(self) -> Self:
        if supervisor_running(self.paths):  # the file started servers before it listed some
            raise ConflictError(
                f"fleet {self.ref.name} is up: skyctl started its servers",
                hint=f"first: skyctl down --fleet {self.ref.name}",
            )
        # a failing disk must not prevent thawing a fleet
        self.state = FleetState(self.paths.database, or_memory=True)
        self.state.retention = Retention(**dict(self.ref.config.history))
        try:
            remember(self.ref)
        except StateUnwritable as error:
            LOST.append(Unrecorded(self.paths.database, 1, error.message, error.hint))
        self._servers = AttachedServers(self.ref, self._client, self.state)
        close_orphans(self.state)
        if self.paths.staging.exists():
            from skyctl.checkpoints.staging import sweep
            from skyctl.core.repeated import needed

            # no supervisor restarts them: what an ended push staged serves recovery at most
            await asyncio.to_thread(sweep, self.paths.staging, needed(self.state))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for trainer in self._trainers.values():
            trainer.report("its connection to the fleet was closed")
        for task in self._pushes.values():
            task.cancel()
        await asyncio.gather(*self._pushes.values(), return_exceptions=True)
        await self._client.aclose()
        self.state.close()

    async def _ask(self, verb: Verb[Q, R], request: Q, result: type[R]) -> R:
        raise UsageError(
            f"cannot {verb.name} fleet {self.ref.name}: skyctl did not start its servers",
            hint="a fleet file with `servers:` is for control only",
        )

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        """Every server and the router, asked now and all at once: no process watches them."""
        targets = await self._servers.locate(within_s=_WATCHED_S)
        router, workers = await attached_status.router(self.ref.config, self._client)
        rows = self._servers.rows()
        pushing = await asyncio.to_thread(self.arbiter.pushing)
        replicas = await attached_status.servers(self._client, targets, rows, workers, pushing)
        health, reasons = assess(replicas, router, pushing=pushing)
        reasons += tuple(map(stopped, await asyncio.to_thread(self.arbiter.stopped)))
        return FleetStatus(
            self.ref.name,
            health,
            replicas,
            router,
            reasons,
            weight_version=self.state.weights().version,
            adapters=tuple(adapter.served_as for adapter in served(self.state).values()),
        )

    async def control(self, request: Control) -> Outcomes:
        act = Act.of_verb(request.verb)
        with await self._turn(act, f"skyctl {request.verb}", request) as turn:
            outcomes = await verbs.run(
                request,
                self._named(request.servers),
                client=self._client,
                state=self.state,
                timeout_s=self.ref.config.control_timeout_s,
                undoes=turn.keeps_others_out,
                unrepaired=turn.unrepaired,
            )
        if not (not_found := self._servers.not_found):
            return outcomes
        note = f"sent to its last address: {not_found}"
        return tuple(outcome.noting(note) for outcome in outcomes)

    async def start_push(self, request: PushRequest) -> str:
        """Begin a push in this process."""
        return await self._begin(request)

    async def cancel_job(self, request: CancelJob) -> None:
        await asyncio.sleep(0)  # a task that never ran would end nothing
        task = self._pushes.get(request.job)
        if task is None or task.done():
            await super().cancel_job(request)
        elif not task.cancelling():  # a second one would end it where it is
            if trainer := self._trainers.get(request.job):
                trainer.report(CANCELLED)
            task.cancel()

    async def open_update(self, request: OpenUpdate) -> OpenedUpdate:
        """Begin an update in this process, which is the trainer's."""
        transfer = self.ref.config.weight_transfer
        trainer = Trainer(
            request.at, request.process, request.timeout_s or transfer.update_timeout_s
        )
        job = await self._begin(request.push, trainer)
        self._trainers[job] = trainer
        servers = await trainer.targets(self._pushes[job])
        return OpenedUpdate(job, servers, self._servers.targets[0].holder)

    async def close_update(self, request: CloseUpdate) -> None:
        close_sender(self.state, request.job)
        if request.job in self._trainers:
            self._trainers.pop(request.job).report(
                request.failure, request.version, passed_on=request.passed_on
            )

    async def offer(self, request: Offer) -> Offered:
        from skyctl.push.live_way import take_offer

        with await self._turn(Act.PUSH, "a trainer's offer"):
            live = await take_offer(request, await self._would_take(), self._client)
            self._offers = {live.key: live}
        return live.offered(unkept="no process of an attached fleet is there after the push")

    async def push_live(self, request: PushLive) -> str:
        live = self._offers.get(request.key)
        if live is None:
            raise NotFoundError("the trainer's offer is not known any more", hint="offer it again")
        live = live.with_push(request.numbers, request.group, forms=request.forms)
        return await self._begin(request.push, live=live)

    async def withdraw(self, request: Withdraw) -> None:
        from skyctl.push.live_way import release_all

        if self._offers.pop(request.key, None) is not None:
            with await self._turn(Act.PUSH, "the end of a trainer"):
                await release_all(await self._would_take(), self._client)

    async def rendezvous(self, request: Rendezvous) -> tuple[SendTarget, ...]:
        from skyctl.push.senderless_delivery import ask_targets

        return await ask_targets(await self._would_take(), request, self._client)

    async def _would_take(self) -> PushFleet:
        """The servers a push would go to now."""
        from skyctl.service.attached_push import push_fleet

        return push_fleet(self.ref, await self._servers.locate(), PushRequest(""), self.state)

    async def _begin(
        self, request: PushRequest, trainer: Trainer | None = None, live: Live | None = None
    ) -> str:
        from skyctl.core.jobs import resolved
        from skyctl.push.tracing import current_traceparent
        from skyctl.service.attached_push import begin

        request = await asyncio.to_thread(resolved, request)
        request = replace(request, traceparent=current_traceparent())
        turn = await self._turn(Act.PUSH, "a push that is just starting")
        try:
            refuse_held(self.state, trainer.process if trainer else None)
            self._servers.forget_gone()
            job, task = begin(
                self.ref, self.targets, request, self._client, self.state, turn, trainer, live
            )
        except BaseException:
            turn.release()
            raise
        self._pushes[job.id] = task
        return job.id

    async def model_path(self) -> str | None:
        """What the servers run, by the last push or their own report."""
        from skyctl.service.attached_push import model_path

        return await model_path(await self._servers.locate(), self._client, self.state)

    async def staging(self) -> Staging:
        return Staging(self.paths.staging, frozenset(), self.paths.adapters)

    async def weights(self) -> WeightsState:
        """The recorded weights of discovered servers, without discovering them again."""
        rows = tuple(self.state.servers())
        if isinstance(self.ref.config.servers, list):
            targets = await self._servers.locate()
            recorded = self._servers.rows()
            rows = tuple(recorded[target.name] for target in targets)
        return replace(await super().weights(), servers=rows)

    async def verify_weights(self) -> Verification:
        from skyctl.core.expectations import verify_servers

        targets = await self._servers.locate()
        rows = self._servers.rows().values()
        return await verify_servers(targets, rows, self._client, self.state)

    async def save_weights(self, request: SaveWeights) -> SavedWeights:
        from skyctl.core.saving import save_weights

        with await self._turn(Act.VERB, f"skyctl weights save {request.directory}"):
            base = await self.model_path()
            targets = self.targets
            return await save_weights(
                request, targets, base=base, state=self.state, client=self._client
            )

    async def change_adapter(self, request: LoadAdapter | UnloadAdapter) -> AdapterChange:
        from skyctl.adapters.change import change_all
        from skyctl.adapters.committed import retire
        from skyctl.adapters.given import keep

        with await self._turn(Act.VERB, f"skyctl adapters, {request.name}"):
            fleet = await self._adapter_fleet()
            change = await change_all(fleet, request)
            unkept = await keep(fleet)  # no process does it later
            await retire(fleet)
        return replace(change, notes=change.notes + unkept)

    async def _adapter_fleet(self) -> AdapterFleet:
        from skyctl.adapters.fleet import AdapterFleet

        def targets() -> tuple[Sequence[ServerTarget], dict[str, str]]:
            rows = {row.name: row for row in self.state.servers()}
            absent: dict[str, str] = {
                name: ReplicaState.QUARANTINED if row.quarantine else ReplicaState.ASLEEP
                for name, row in rows.items()
                if row.quarantine or row.sleep_level
            }
            return [target for target in self.targets if target.name not in absent], absent

        config = self.ref.config
        model = await self.model_path()
        return AdapterFleet(
            name=self.ref.name,
            state=self.state,
            client=self._client,
            targets=targets,
            directory=self.paths.adapters,
            locks=self.server_locks,
            timeout_s=config.control_timeout_s,
            model=model,
            bases=[model_name for model_name in (model, config.served_model_name) if model_name],
            reserved=[config.served_model_name] if config.served_model_name else [],
            max_rank=None if config.lora is None else config.lora.max_rank,
            max_adapters=None if config.lora is None else config.lora.max_adapters,
        )

    async def findings(self) -> tuple[Finding, ...]:
        from skyctl.service.attached_recovery import find

        await self._servers.locate()
        servers = await find(self._servers, self._client, self.state, self.server_locks)
        return (*map(stopped, await asyncio.to_thread(self.arbiter.stopped)), *servers)

    async def recover(self, request: Recover = Recover()) -> tuple[Recovered, ...]:
        """Recover from outside. Waits for a push, or another recovery, at most `timeout_s`."""
        from skyctl.service.attached_recovery import recover

        return await recover(
            self.ref,
            self._servers,
            self._client,
            self.state,
            arbiter=self.arbiter,
            locks=self.server_locks,
            wait_s=request.timeout_s,
        )

    async def urls(self) -> FleetUrls:
        """Where to send requests; the URL of the router's metrics is unknown."""
        router = self.ref.config.router
        return FleetUrls(
            name=self.ref.name,
            model=self.ref.config.served_model_name,
            router=router.rstrip("/") if isinstance(router, str) else None,
            servers={target.name: target.url for target in await self._servers.locate()},
            access=access(self.ref.config, self.paths),
            engine=self.ref.config.engine,
        )

    async def logs(self, request: LogQuery = LogQuery()) -> dict[str, tuple[str, ...]]:
        raise UsageError(
            f"fleet {self.ref.name} is attached: skyctl did not start its servers",
            hint="their logs are where they were started",
        )

    async def _turn(self, act: Act, activity: str, verb: Control | None = None) -> Turn:
        """The right to act on all servers, or those of the verb, of a fleet whose dead pushes have
        all been noticed, and whose servers have their own records. A verb leaves those alone that
        another fleet has to repair, as `Turn.unrepaired` says.
        """
        thaws, named = isinstance(verb, Resume | Wake), () if verb is None else verb.servers
        turn = await self.arbiter.turn(act, activity)
        try:
            close_orphans(self.state, in_turn=True)  # by the names that servers had then
            await self._servers.locate(or_frozen=thaws)
            if await self._servers.adopt(alone=act is not Act.VERB):
                urls, leaves = {t.name: t.url for t in self._named(named)}, verb is not None
                await self.arbiter.claim(turn, act, activity, urls, leaves_unrepaired=leaves)
                return turn
        except BaseException:
            turn.release()
            raise
        turn.release()  # others that share it use the names on record
        return await self._turn(Act.SLEEP, activity, verb)

    def _named(self, servers: Sequence[str]) -> tuple[ServerTarget, ...]:
        if not servers:
            return self.targets
        targets = {target.name: target for target in self.targets}
        for name in servers:
            if name not in targets:
                raise no_server(self.ref.name, name, targets)
        return tuple(targets[name] for name in dict.fromkeys(servers))
