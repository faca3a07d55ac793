"""A fleet that skyctl started, through its supervisor's unix socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

from skyctl.core.registry import FleetRef, supervisor_running
from skyctl.errors import ConflictError, FleetDownError, SkyctlError, UsageError
from skyctl.kill_points import reached
from skyctl.supervisor.client import CALL_TIMEOUT_S, SupervisorClient
from skyctl.supervisor.wire import spoken, version_mismatch

if TYPE_CHECKING:
    from skyctl.adapters import AdapterChange, LoadAdapter, UnloadAdapter
    from skyctl.core.diagnosis import Finding
    from skyctl.core.recovery import Recovered
    from skyctl.core.status import FleetStatus
    from skyctl.push.request import PushRequest
    from skyctl.service.urls import FleetUrls
    from skyctl.store.adapters import AdapterVersion
    from skyctl.store.journal import Job, JobEvent, PushRecord
    from skyctl.store.state import Event, FleetState, ServerRow

ADOPTION_WAIT_S = 60.0
ADOPTION_POLL_S = 0.2
_VERB_GRACE_S = 45.0  # beyond a verb's deadline: states read back, a rollback, a router that hangs


class SupervisedFleet:
    """One fleet with a supervisor. Every verb raises FleetDownError when it does not answer."""

    def __init__(self, ref: FleetRef) -> None:
        self.ref = ref
        self._client = SupervisorClient(ref.paths)
        self._looked = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()

    async def status(self, *, fresh: bool = True) -> FleetStatus:
        """The fleet now; what is left of it when its supervisor is gone.

        Unless `fresh`, which is cheaper, a pause that was not made through skyctl shows only with
        the supervisor's next health probe.
        """
        from skyctl.core.status import FleetStatus

        try:
            path = "/status" if fresh else "/status?fresh=0"
            return FleetStatus.from_json(await self._get(path))
        except FleetDownError as error:
            from skyctl.service.unsupervised import unsupervised_status

            return unsupervised_status(self.ref.paths, why=error.message)
        except TypeError as error:  # keys that only another skyctl knows
            raise version_mismatch("", spoken()) from error

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
        """Wake servers, entirely or only `tags`.

        Raises:
            ConflictError: a server would serve weights that its sleep discarded.
        """
        return await self._verb("wake", {"tags": list(tags)}, servers, timeout_s)

    async def start_push(self, request: PushRequest) -> str:
        """Begin a push in the supervisor and return its job id at once.

        A supervisor that is just taking the fleet over is waited for, `ADOPTION_WAIT_S` seconds.

        Raises:
            ConflictError: another push or an operation is in progress; the message names it.
        """
        from skyctl.push.tracing import current_traceparent

        request = replace(request, traceparent=current_traceparent())
        reached("sync.asked")
        deadline = time.monotonic() + ADOPTION_WAIT_S
        while True:
            try:
                answer = await self._post("/jobs", {"request": request.to_json()})
                break
            except ConflictError as error:
                # a new supervisor puts right what its predecessor left, and will take the push then
                adopting = error.details.get("operation") == "adopt"
                if not adopting or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(ADOPTION_POLL_S)
        reached("sync.begun")
        return str(answer["id"])

    async def model_path(self) -> str | None:
        """Directory or hub id of what the servers run now."""
        from skyctl.fleetfile.schema import resolve_relative

        with self._state() as state:
            pushed = state.weights().checkpoint
        model = self.ref.config.model
        return pushed or (resolve_relative(model, self.ref.base_dir) if model else None)

    def staging(self) -> tuple[Path, set[str | None]]:
        """Where weights from memory are written, and the checkpoints there that must stay."""
        with self._state() as state:
            return self.ref.paths.staging, state.checkpoints()

    async def jobs(self) -> list[Job]:
        """The latest jobs, newest first (also while the fleet is down)."""
        with self._state() as state:
            return state.journal.jobs()

    async def job(self, job_id: str) -> Job:
        """One job. Raises NotFoundError."""
        with self._state() as state:
            return state.journal.job(job_id)

    async def wait_job(
        self,
        job_id: str,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> Job:
        """Follow a job until it ends; `on_event` hears its past events first, then each new one.

        A job that failed is returned, not raised.

        Raises:
            DeadlineExceeded: it has not ended after `timeout_s` seconds (it goes on).
            FleetDownError: the supervisor that runs it went away.
        """
        from skyctl.core.following import CHANGES_WAIT_S, JobChanges, follow, job_changes

        async def changes(after: int) -> JobChanges:
            path = f"/jobs/{quote(job_id)}?after={after}&wait_s={CHANGES_WAIT_S:g}"
            try:
                answer = await self._client.get(path, timeout_s=CHANGES_WAIT_S + CALL_TIMEOUT_S)
                return JobChanges.from_json(answer)
            except FleetDownError:  # nobody runs it any more: the journal says how far it came
                with self._state() as state:
                    return await job_changes(state, job_id, after, wait_s=CHANGES_WAIT_S)

        return await follow(job_id, changes, on_event, timeout_s=timeout_s)

    async def job_events(self, job_id: str) -> list[JobEvent]:
        """What has happened in a job so far, oldest first."""
        with self._state() as state:
            return state.journal.events(job_id)

    async def weights(self) -> tuple[list[ServerRow], list[PushRecord]]:
        """What each server carries (as recorded by the last push), and the pushes, newest first."""
        with self._state() as state:
            return state.servers(), state.journal.pushes()

    async def events(self, limit: int = 100) -> list[Event]:
        """The latest lines of the fleet's history, oldest first; [] when it has none."""
        if not self.ref.paths.database.exists():
            return []
        with self._state() as state:
            return state.events(limit)

    async def verify_weights(self) -> dict[str, Any]:
        """Compare the servers' weights now: {"servers": […], "agree": bool}."""
        return dict(await self._post("/verify", {}, timeout_s=600.0))

    async def adapters(self) -> tuple[AdapterVersion, ...]:
        """The LoRA adapters that the fleet serves, as recorded."""
        from skyctl.store.adapters import served

        with self._state() as state:
            return tuple(served(state).values())

    def adapter_staging(self) -> Path:
        """Where adapters from memory are written."""
        return self.ref.paths.adapters

    async def load_adapter(self, asked: LoadAdapter) -> AdapterChange:
        """Serve a LoRA adapter on every server (see `skyctl.adapters.load`)."""
        return await self._adapter_change("/adapters/load", asked)

    async def unload_adapter(self, asked: UnloadAdapter) -> AdapterChange:
        """Serve a LoRA adapter no longer."""
        return await self._adapter_change("/adapters/unload", asked)

    async def _adapter_change(self, path: str, asked: LoadAdapter | UnloadAdapter) -> AdapterChange:
        from pydantic import TypeAdapter

        from skyctl.adapters import AdapterChange

        timeout_s = asked.timeout_s or self.ref.config.control_timeout_s
        answer = await self._post(path, asdict(asked), timeout_s=4 * timeout_s + _VERB_GRACE_S)
        return TypeAdapter(AdapterChange).validate_python(answer)

    async def findings(self) -> tuple[Finding, ...]:
        """What is the matter with each server; nothing is started for it."""
        from skyctl.service.supervised_recovery import find

        return await find(self.ref, self._client)

    async def recover(self, timeout_s: float | None = None) -> tuple[Recovered, ...]:
        """Put right what can be: with a supervisor of this version, started if need be.

        Raises:
            ConflictError: it is busy with something else.
            DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
        """
        from skyctl.service.supervised_recovery import recover

        return await recover(self.ref, self._client, timeout_s=timeout_s)

    async def restart(self, names: Sequence[str] = ()) -> int:
        """Begin a rolling restart of these servers (all when empty); the operation's number.

        Raises:
            NotFoundError: no such server. ConflictError: the supervisor is busy.
        """
        answer = await self._post("/restart", {"servers": list(names)})
        return int(answer["operation"])

    async def scale(self, replicas: int) -> int:
        """Begin to run `replicas` servers; the operation's number, 0 when there is nothing to do.

        Raises:
            UsageError: the fleet file lists replica groups, or the count is not positive.
        """
        from skyctl.service.planning import scaled, usable
        from skyctl.supervisor.wire import plan_to_json

        if replicas < 1:
            raise UsageError(f"cannot scale to {replicas}", hint="to stop the fleet: skyctl down")
        await self._get("/status")  # down or not, before anything is planned
        plan = plan_to_json(usable(self.ref, scaled(self.ref, replicas)))
        reached("scale.asked")
        answer = await self._client.post("/reconcile", {"plan": plan, "kind": "scale"})
        return int(answer["operation"])

    async def urls(self) -> FleetUrls:
        """Where to send requests. Raises FleetDownError."""
        from skyctl.core.plan import local_url
        from skyctl.service.urls import FleetUrls, access

        status = await self.status()
        if status.supervised is False:
            raise down_error(self.ref.name)
        router = status.router
        metrics = None
        if router is not None and router.metrics_port is not None:
            host = urlsplit(router.url).hostname or "127.0.0.1"
            metrics = local_url(host, router.metrics_port)
        return FleetUrls(
            name=self.ref.name,
            model=status.model,
            router=router.url if router is not None else None,
            servers={replica.name: replica.url for replica in status.replicas},
            router_metrics=metrics,
            access=access(self.ref),
        )

    def api_key(self) -> str | None:
        """The key of inference."""
        from skyctl.service.keys import api_key

        return api_key(self.ref)

    def control_token(self) -> str | None:
        """What the servers' control routes ask for; the API key where they ask for nothing."""
        from skyctl.service.keys import api_key, control_token

        return control_token(self.ref) or api_key(self.ref)

    async def _verb(
        self,
        verb: str,
        arguments: dict[str, Any],
        servers: Sequence[str] | None,
        timeout_s: float | None,
    ) -> list[dict[str, Any]]:
        timeout_s = timeout_s or self.ref.config.control_timeout_s
        body = {"arguments": arguments, "servers": servers and list(servers)}
        reached("verb.asked")
        answer = await self._post(
            f"/verbs/{verb}", {**body, "timeout_s": timeout_s}, timeout_s=timeout_s + _VERB_GRACE_S
        )
        reached("verb.answered")
        return list(answer["outcomes"])

    async def _get(self, path: str) -> dict[str, Any]:
        await self._revive()
        return await self._client.get(path)

    async def _post(
        self, path: str, body: dict[str, Any], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        await self._revive()
        return await self._client.post(path, body, timeout_s=timeout_s)

    async def _revive(self) -> None:
        """Start a supervisor for servers that were left without one, once per connection.

        Raises:
            FleetDownError: it cannot be started.
        """
        if self._looked:
            return
        self._looked = True
        if supervisor_running(self.ref.paths):
            return
        from skyctl.service.left_alone import left_alone

        if not left_alone(self.ref.paths):
            return
        from skyctl.service.revive import revive

        try:
            await revive(self.ref)
        except SkyctlError as error:
            raise FleetDownError(
                f"the supervisor of fleet {self.ref.name} is gone, and no other can take its "
                f"place: {error.message}",
                hint=error.hint or "take the servers over: skyctl up; or stop them: skyctl down",
            ) from error

    def _state(self) -> FleetState:
        from skyctl.store.state import FleetState

        if not self.ref.paths.database.exists():
            raise down_error(self.ref.name)
        return FleetState(self.ref.paths.database)


def down_error(name: str) -> FleetDownError:
    """The error of every verb that needs a running fleet."""
    return FleetDownError(f"fleet {name} is not running", hint="start it: skyctl up")
