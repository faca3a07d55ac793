"""A fleet that skyctl did not start: the same verbs straight to its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from skyctl.core import verbs
from skyctl.core.arbiter import Act, Arbiter, Turn
from skyctl.core.registry import FleetRef, remember
from skyctl.core.status import FleetStatus
from skyctl.errors import NotFoundError, StateUnwritable, UsageError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.service.urls import FleetUrls, access
from skyctl.store.adapters import AdapterVersion, served
from skyctl.store.in_doubt import close_orphans
from skyctl.store.journal import Job, JobEvent, PushRecord
from skyctl.store.retention import Retention
from skyctl.store.state import Event, FleetState, ServerRow
from skyctl.store.unrecorded import LOST, Unrecorded

if TYPE_CHECKING:
    from skyctl.adapters import AdapterChange, AdapterFleet, LoadAdapter, UnloadAdapter
    from skyctl.core.diagnosis import Finding
    from skyctl.core.recovery import Recovered
    from skyctl.push.transaction import PushRequest


class AttachedFleet:
    """Servers by URL, named `<fleet>-0`, `-1`, … in the fleet file's order.

    Pushes run in this process: `start_push` begins one and `wait_job` must be awaited in the same
    `connect` block, or the push is cancelled when the block ends.
    """

    def __init__(self, ref: FleetRef, *, client: ControlClient | None = None) -> None:
        from skyctl.service.keys import api_key, control_token

        self.ref = ref
        self._client = client or ControlClient()
        self._key = api_key(ref)
        self._token = control_token(ref) or self._key
        self._pushes: dict[str, asyncio.Task[None]] = {}
        self.targets = tuple(
            ServerTarget(f"{ref.name}-{index}", url.rstrip("/"), self._token, ref.config.engine)
            for index, url in enumerate(ref.config.servers or ())
        )

    async def __aenter__(self) -> Self:
        # a disk that fails must not take away what thaws a fleet
        self._state = FleetState(self.ref.paths.database, or_memory=True)
        self._arbiter = Arbiter(self._state.locks)
        self._state.retention = Retention(**self.ref.config.history.model_dump())
        try:
            remember(self.ref, self._state)
        except StateUnwritable as error:
            LOST.append(Unrecorded(self.ref.paths.database, 1, error.message, error.hint))
        close_orphans(self._state)
        if self.ref.paths.staging.exists():
            await self._sweep()
        return self

    async def _sweep(self) -> None:
        """Nobody restarts these servers: weights of an ended push are of no further use, unless
        recovery needs them."""
        from skyctl.checkpoints.staging import sweep
        from skyctl.core.recovery import needed

        await asyncio.to_thread(sweep, self.ref.paths.staging, needed(self._state))

    async def __aexit__(self, *exception: object) -> None:
        for task in self._pushes.values():
            task.cancel()
        await asyncio.gather(*self._pushes.values(), return_exceptions=True)
        await self._client.aclose()
        self._state.close()

    async def status(self, *, fresh: bool = True) -> FleetStatus:
        """Every server and the router, asked now, side by side (nobody else could know)."""
        from skyctl.service.attached_status import attached_status

        router = self.ref.config.router
        return await attached_status(
            self._client,
            self.ref.name,
            self.targets,
            router if isinstance(router, str) else None,
            self._state,
            engine=self.ref.config.engine,
        )

    async def pause(
        self,
        mode: str = "abort",
        clear_cache: bool = True,
        servers: Sequence[str] | None = None,
        timeout_s: float | None = None,
        keep_partial: bool = False,
    ) -> list[dict[str, Any]]:
        """Pause all servers (or those named); one outcome's JSON per server.

        When some cannot be paused the others are resumed, unless `keep_partial`.
        """
        arguments = {"mode": mode, "clear_cache": clear_cache, "keep_partial": keep_partial}
        return await self._verb("pause", arguments, servers, timeout_s)

    async def resume(
        self, servers: Sequence[str] | None = None, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Resume; servers that are asleep or quarantined are skipped and say so."""
        return await self._verb("resume", {}, servers, timeout_s)

    async def sleep(
        self,
        level: int = 1,
        servers: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Put servers to sleep (level 2 discards the weights)."""
        return await self._verb("sleep", {"level": level}, servers, timeout_s)

    async def wake(
        self,
        tags: Sequence[str] = (),
        servers: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Wake servers. Raises ConflictError when one would serve discarded weights."""
        return await self._verb("wake", {"tags": list(tags)}, servers, timeout_s)

    async def start_push(self, request: PushRequest) -> str:
        """Begin a push in this process and return its job id.

        Raises:
            ConflictError: somebody else acts on the fleet; the message says who.
            StateUnwritable: the push cannot be put on record; nothing was touched.
        """
        from skyctl.push.tracing import current_traceparent
        from skyctl.service.attached_push import begin

        request = replace(request, traceparent=current_traceparent())
        turn = await self._turn(Act.PUSH, "a push that is just starting")
        try:
            job, task = begin(self.ref, self.targets, request, self._client, self._state, turn)
        except BaseException:
            turn.release()
            raise
        self._pushes[job.id] = task
        return job.id

    async def model_path(self) -> str | None:
        """Directory or hub id of what the servers run now, as they or the last push say."""
        from skyctl.service.attached_push import model_path

        return await model_path(self.targets, self._client, self._state)

    def staging(self) -> tuple[Path, set[str | None]]:
        """Where weights from memory are written, and the checkpoints there that must stay."""
        return self.ref.paths.staging, set()

    async def jobs(self) -> list[Job]:
        """The latest jobs, newest first."""
        return self._state.journal.jobs()

    async def job(self, job_id: str) -> Job:
        """One job. Raises NotFoundError."""
        return self._state.journal.job(job_id)

    async def wait_job(
        self,
        job_id: str,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> Job:
        """Follow a job of this or another process until it ends, by the journal."""
        from skyctl.core.following import follow_record

        return await follow_record(self._state, job_id, on_event, timeout_s=timeout_s)

    async def job_events(self, job_id: str) -> list[JobEvent]:
        """What has happened in a job so far, oldest first."""
        return self._state.journal.events(job_id)

    async def weights(self) -> tuple[list[ServerRow], list[PushRecord]]:
        """What each server carries (as recorded by the last push), and the pushes, newest first."""
        known = {row.name: row for row in self._state.servers()}
        rows = [known.get(t.name, ServerRow(t.name)) for t in self.targets]
        return rows, self._state.journal.pushes()

    async def events(self, limit: int = 100) -> list[Event]:
        """The latest lines of the fleet's history, oldest first."""
        return self._state.events(limit)

    async def verify_weights(self) -> dict[str, Any]:
        """Compare the servers' weights now: {"servers": […], "agree": bool}."""
        from skyctl.core.jobs import verify_servers

        return await verify_servers(self.targets, self._client, self._state)

    async def adapters(self) -> tuple[AdapterVersion, ...]:
        """The LoRA adapters that this fleet has loaded, as recorded."""
        return tuple(served(self._state).values())

    def adapter_staging(self) -> Path:
        """Where adapters from memory are written."""
        return self.ref.paths.adapters

    async def load_adapter(self, asked: LoadAdapter) -> AdapterChange:
        """Serve a LoRA adapter on every server (see `skyctl.adapters.load`)."""
        from skyctl.adapters import load, retire

        with await self._turn(Act.VERB, f"skyctl adapters, {asked.name}"):
            fleet = await self._adapter_fleet()
            change = await load(fleet, asked)
            await retire(fleet)
        return change

    async def unload_adapter(self, asked: UnloadAdapter) -> AdapterChange:
        """Serve a LoRA adapter no longer."""
        from skyctl.adapters import retire, unload

        with await self._turn(Act.VERB, f"skyctl adapters, {asked.name}"):
            fleet = await self._adapter_fleet()
            change = await unload(fleet, asked)
            await retire(fleet)
        return change

    async def _adapter_fleet(self) -> AdapterFleet:
        from skyctl.adapters import AdapterFleet

        def targets() -> tuple[Sequence[ServerTarget], dict[str, str]]:
            rows = {row.name: row for row in self._state.servers()}
            absent = {
                name: "quarantined" if row.quarantine else "asleep"
                for name, row in rows.items()
                if row.quarantine or row.sleep_level
            }
            return [one for one in self.targets if one.name not in absent], absent

        config = self.ref.config
        model = await self.model_path()
        return AdapterFleet(
            name=self.ref.name,
            state=self._state,
            client=self._client,
            targets=targets,
            directory=self.ref.paths.adapters,
            timeout_s=config.control_timeout_s,
            model=model,
            bases=[one for one in (model, config.served_model_name) if one],
            reserved=[config.served_model_name] if config.served_model_name else [],
            max_rank=None if config.lora is None else config.lora.max_rank,
            max_adapters=None if config.lora is None else config.lora.max_adapters,
        )

    async def findings(self) -> tuple[Finding, ...]:
        """What is the matter with each server, asked now."""
        from skyctl.service.attached_recovery import find

        return await find(self.targets, self._client, self._state)

    async def recover(self, timeout_s: float | None = None) -> tuple[Recovered, ...]:
        """Put right what can be put right from outside; one report per server.

        Raises:
            ConflictError: another recovery has not ended after `timeout_s` seconds.
        """
        from skyctl.service.attached_recovery import recover

        return await recover(self.ref, self.targets, self._client, self._state, wait_s=timeout_s)

    async def restart(self, names: Sequence[str] = ()) -> int:
        raise self._not_ours("restart")

    async def scale(self, replicas: int) -> int:
        raise self._not_ours("scale")

    async def urls(self) -> FleetUrls:
        """Where to send requests; the router's metrics are not known."""
        router = self.ref.config.router
        return FleetUrls(
            name=self.ref.name,
            model=self.ref.config.served_model_name,
            router=router.rstrip("/") if isinstance(router, str) else None,
            servers={target.name: target.url for target in self.targets},
            access=access(self.ref),
        )

    def api_key(self) -> str | None:
        """The key of inference, from this process's environment."""
        return self._key

    def control_token(self) -> str | None:
        """What the servers' control routes ask for, from this process's environment."""
        return self._token

    def _not_ours(self, verb: str) -> UsageError:
        return UsageError(
            f"cannot {verb} fleet {self.ref.name}: skyctl did not start its servers",
            hint="a fleet file with `servers:` is for control only",
        )

    async def _verb(
        self,
        verb: str,
        arguments: dict[str, Any],
        servers: Sequence[str] | None,
        timeout_s: float | None,
    ) -> list[dict[str, Any]]:
        targets = self._named(servers)
        with await self._turn(Act.of_verb(verb), f"skyctl {verb}"):
            outcomes = await verbs.run(
                verb,
                arguments,
                targets,
                client=self._client,
                state=self._state,
                timeout_s=timeout_s or self.ref.config.control_timeout_s,
            )
        return [outcome.to_json() for outcome in outcomes]

    async def _turn(self, act: Act, what: str) -> Turn:
        """The right to act on a fleet in which no dead push is left unnoticed."""
        turn = await self._arbiter.turn(act, what)
        try:
            close_orphans(self._state, in_turn=True)
        except BaseException:
            turn.release()
            raise
        return turn

    def _named(self, servers: Sequence[str] | None) -> tuple[ServerTarget, ...]:
        if not servers:
            return self.targets
        known = {target.name: target for target in self.targets}
        for name in servers:
            if name not in known:
                raise NotFoundError(
                    f"fleet {self.ref.name} has no server {name!r}",
                    hint=f"its servers are: {', '.join(known)}",
                )
        return tuple(known[name] for name in servers)
