"""A fleet as its users see it: one method per verb of `verb_table.py`.

    FleetService              forwards its verbs: subclasses implement `_ask`
    ├── RemoteFleet           a supervisor, by its HTTP API (`supervisor/client.py`)
    │   └── SupervisedFleet   … of this machine, restarted when it is gone (`service/`)
    └── RecordedFleet         the state file (`core/recorded.py`)
        ├── UnsupervisedFleet … of a fleet whose supervisor is gone (`service/`)
        ├── AttachedFleet     … and servers by URL (`service/`)
        └── Supervisor        … and servers of its own (`supervisor/`)

A result's type is imported by the verb that returns it: a push starts before the modules that
display it are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
from skyctl.core import verb_table
from skyctl.core.canary import CanaryRequest, CanaryStatus
from skyctl.core.requests import (
    CancelJob,
    CloseUpdate,
    Control,
    Down,
    Drain,
    EventQuery,
    Forget,
    JobQuery,
    LogQuery,
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
    Staging,
    StatusQuery,
    TakenDown,
    Wake,
    Withdraw,
)
from skyctl.core.verb_table import Q, R, Verb
from skyctl.live.offer import Offer, Offered
from skyctl.push.request import PushRequest
from skyctl.push.trainer import Rendezvous, SendTarget

if TYPE_CHECKING:
    from skyctl.adapters.fleet import AdapterChange
    from skyctl.core.findings import Finding
    from skyctl.core.following import JobChanges
    from skyctl.core.recovery import Recovered
    from skyctl.core.results import KeptVersion, Processes, SavedWeights, WeightsState
    from skyctl.core.status import FleetStatus
    from skyctl.core.urls import FleetUrls
    from skyctl.push.verify import Verification
    from skyctl.store.adapters import AdapterVersion
    from skyctl.store.journal import Job, JobEvent
    from skyctl.store.state import Event

_CONTROLS: Final[Mapping[type[Control], Verb[Any, Outcomes]]] = {
    verb.request: verb
    for verb in (verb_table.PAUSE, verb_table.RESUME, verb_table.SLEEP, verb_table.WAKE)
}


class FleetService:
    """One fleet. A verb that needs a running fleet raises FleetDownError if there is none."""

    async def _ask(self, verb: Verb[Q, R], request: Q, result: type[R]) -> R:
        """The verb's result, from whatever implements it, within its patience."""
        raise NotImplementedError(verb.name)

    async def control(self, request: Control) -> Outcomes:
        """The common part of pause, resume, sleep and wake."""
        return await self._ask(_CONTROLS[type(request)], request, Outcomes)

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        """Every replica and the router, with a verdict; also of a fleet that is down."""
        from skyctl.core.status import FleetStatus

        return await self._ask(verb_table.STATUS, request, FleetStatus)

    async def pause(self, request: Pause = Pause()) -> Outcomes:
        """Stop generation on every server at once.

        Raises:
            ConflictError: a push or a recovery is under way (as for every verb that changes
                servers).
            NotFoundError: there is no server of one of the names.
        """
        return await self.control(request)

    async def resume(self, request: Resume = Resume()) -> Outcomes:
        """Let every server generate again."""
        return await self.control(request)

    async def sleep(self, request: Sleep = Sleep()) -> Outcomes:
        """Free the servers' memory."""
        return await self.control(request)

    async def wake(self, request: Wake = Wake()) -> Outcomes:
        """Take the memory back. Raises ConflictError if discarded weights would be served."""
        return await self.control(request)

    async def start_push(self, request: PushRequest) -> str:
        """Begin a push and return its job's id. Waits for a supervisor that is still taking the
        fleet over.

        Raises:
            ConflictError: another command acts on the fleet; the message names it.
            StateUnwritable: the push cannot be put on record; nothing was touched.
        """
        from skyctl.push.tracing import current_traceparent

        request = replace(request, traceparent=current_traceparent())
        return await self._ask(verb_table.START_PUSH, request, str)

    async def open_update(self, request: OpenUpdate) -> OpenedUpdate:
        """Begin a push whose weights a trainer sends itself; returns once the servers are frozen
        and wait for them. Raises as `start_push`.
        """
        from skyctl.push.tracing import current_traceparent

        traced = replace(request.push, traceparent=current_traceparent())
        return await self._ask(verb_table.OPEN_UPDATE, replace(request, push=traced), OpenedUpdate)

    async def close_update(self, request: CloseUpdate) -> None:
        """Report that an update is sent, or will not be; a no-op once it is over."""
        return await self._ask(verb_table.CLOSE_UPDATE, request, type(None))

    async def offer(self, request: Offer) -> Offered:
        """Plan how servers copy out of a trainer's memory, and remember it for its pushes; an
        earlier offer is forgotten. Nothing is copied.

        Raises:
            PreflightError: they cannot; says why.
            ConflictError: another command acts on the fleet.
        """
        return await self._ask(verb_table.OFFER, request, Offered)

    async def push_live(self, request: PushLive) -> str:
        """Begin a push of what was offered, and return its job's id. Raises as `start_push`.

        Raises:
            NotFoundError: nothing was offered under this key, or another offer came.
        """
        from skyctl.push.tracing import current_traceparent

        traced = replace(request.push, traceparent=current_traceparent())
        return await self._ask(verb_table.PUSH_LIVE, replace(request, push=traced), str)

    async def withdraw(self, request: Withdraw) -> None:
        """Have the servers let go of the memory of a trainer that ends; a no-op if they have.

        Raises:
            ConflictError: another command acts on the fleet; its end does the same.
        """
        return await self._ask(verb_table.WITHDRAW, request, type(None))

    async def rendezvous(self, request: Rendezvous) -> tuple[SendTarget, ...]:
        """What a trainer must know of each server to send to it. Changes nothing.

        Raises:
            PreflightError: a server takes no weights. ServerError: one does not answer.
        """
        return await self._ask(verb_table.RENDEZVOUS, request, tuple[SendTarget, ...])

    async def jobs(self) -> tuple[Job, ...]:
        """Changes under way that are not pushes, then the latest pushes, newest first."""
        from skyctl.store.journal import Job

        return await self._ask(verb_table.JOBS, None, tuple[Job, ...])

    async def job_changes(self, request: JobQuery) -> JobChanges:
        """A job and what happened in it. With `wait_s`, also raises FleetDownError if the process
        that ran it died. Raises NotFoundError.
        """
        from skyctl.core.following import JobChanges

        return await self._ask(verb_table.JOB_CHANGES, request, JobChanges)

    async def cancel_job(self, request: CancelJob) -> None:
        """Ask a push to end: before its first byte it is undone, later it completes; or a change
        of processes or adapters: it is put back. A no-op once it has ended.

        Raises:
            ConflictError: it runs in another process, or is part of a recovery.
        """
        return await self._ask(verb_table.CANCEL_JOB, request, type(None))

    async def job(self, job_id: str) -> Job:
        """One job. Raises NotFoundError."""
        return (await self.job_changes(JobQuery(job_id))).job

    async def wait_job(
        self,
        job_id: str,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> Job:
        """Follow a job until it ends; `on_event` receives its past events first, then each new one.

        A job that failed is returned, not raised.

        Raises:
            DeadlineExceeded: it has not ended after `timeout_s` seconds (it goes on).
            FleetDownError: the process that ran it died, or stays stopped.
        """
        from skyctl.core.following import CHANGES_WAIT_S, follow

        async def changes(after: int) -> JobChanges:
            return await self.job_changes(JobQuery(job_id, after, CHANGES_WAIT_S))

        return await follow(job_id, changes, on_event, timeout_s=timeout_s)

    async def events(self, request: EventQuery = EventQuery()) -> tuple[Event, ...]:
        """The latest lines of the fleet's history, oldest first."""
        from skyctl.store.state import Event

        return await self._ask(verb_table.EVENTS, request, tuple[Event, ...])

    async def weights(self) -> WeightsState:
        """What each server carries (as recorded by the last push), and the pushes."""
        from skyctl.core.results import WeightsState

        return await self._ask(verb_table.WEIGHTS, None, WeightsState)

    async def verify_weights(self) -> Verification:
        """Compare what servers hold with each other, the record and the fleet's checkpoint."""
        from skyctl.push.verify import Verification

        return await self._ask(verb_table.VERIFY_WEIGHTS, None, Verification)

    async def save_weights(self, request: SaveWeights) -> SavedWeights:
        """Have a server write its weights as a Hugging Face checkpoint, while it serves.

        Raises:
            PreflightError: they cannot be read out of it, or the directory is in use.
            NotFoundError: the fleet serves another version.
            ConflictError: a push is in progress.
        """
        from skyctl.core.results import SavedWeights

        return await self._ask(verb_table.SAVE_WEIGHTS, request, SavedWeights)

    async def kept_versions(self) -> tuple[KeptVersion, ...]:
        """The versions of which the fleet keeps its own copy, newest first."""
        from skyctl.core.results import KeptVersion

        return await self._ask(verb_table.KEPT_VERSIONS, None, tuple[KeptVersion, ...])

    async def forget_version(self, request: Forget) -> int:
        """Delete the copies of a version; returns the bytes of weights that were in them.

        Raises:
            NotFoundError: it is not kept.
            ConflictError: the fleet runs it, or a push is in progress.
            UsageError: it may be any of several.
        """
        return await self._ask(verb_table.FORGET_VERSION, request, int)

    async def model_path(self) -> str | None:
        """Directory or hub id of what the servers run now; None if they do not say."""
        return await self._ask(verb_table.MODEL_PATH, None, str | None)  # type: ignore[arg-type]

    async def staging(self) -> Staging:
        """Where a process on the fleet's machine writes weights that are to be pushed."""
        return await self._ask(verb_table.STAGING, None, Staging)

    async def adapters(self) -> tuple[AdapterVersion, ...]:
        """The LoRA adapters that the fleet serves, as recorded."""
        from skyctl.store.adapters import AdapterVersion

        return await self._ask(verb_table.ADAPTERS, None, tuple[AdapterVersion, ...])

    async def load_adapter(self, request: LoadAdapter) -> AdapterChange:
        """Serve a LoRA adapter on every server (see `skyctl.adapters.change.load`)."""
        return await self.change_adapter(request)

    async def unload_adapter(self, request: UnloadAdapter) -> AdapterChange:
        """Stop serving a LoRA adapter."""
        return await self.change_adapter(request)

    async def change_adapter(self, request: LoadAdapter | UnloadAdapter) -> AdapterChange:
        """The common part of loading and unloading."""
        from skyctl.adapters.fleet import AdapterChange

        if isinstance(request, LoadAdapter):
            return await self._ask(verb_table.LOAD_ADAPTER, request, AdapterChange)
        return await self._ask(verb_table.UNLOAD_ADAPTER, request, AdapterChange)

    async def findings(self) -> tuple[Finding, ...]:
        """What is wrong with each server, observed now. Changes nothing."""
        from skyctl.core.findings import Finding

        return await self._ask(verb_table.FINDINGS, None, tuple[Finding, ...])

    async def recover(self, request: Recover = Recover()) -> tuple[Recovered, ...]:
        """Repair what can be; one report per server.

        Raises:
            ConflictError: another command acts on the fleet.
            DeadlineExceeded: it has not ended in time; a supervisor's goes on.
        """
        from skyctl.core.recovery import Recovered

        return await self._ask(verb_table.RECOVER, request, tuple[Recovered, ...])

    async def restart(self, request: Restart = Restart()) -> int:
        """Begin a rolling restart; returns the operation's number.

        Raises:
            NotFoundError: no such server. ConflictError: the supervisor is busy.
            UsageError: skyctl did not start these servers.
        """
        return await self._ask(verb_table.RESTART, request, int)

    async def scale(self, request: Scale) -> int:
        """Begin to run this many servers; returns the operation's number, 0 if there is nothing to
        do.

        Raises:
            UsageError: the fleet file lists replica groups, or the count is not positive.
        """
        return await self._ask(verb_table.SCALE, request, int)

    async def canary(self, request: CanaryRequest = CanaryRequest()) -> CanaryStatus:
        """Begin a canary, promote it or roll it back; or only compare it with the fleet's version.

        Raises:
            ConflictError: another command acts on the fleet, or it has a canary already.
            NotFoundError: it has none. UsageError: it cannot have this one.
        """
        return await self._ask(verb_table.CANARY, request, CanaryStatus)

    async def drain(self, request: Drain = Drain()) -> Readiness:
        """Answer load balancers in front that they are to send nothing more, or to send again:
        `GET /ready` of the supervisor. Nothing else changes.
        """
        return await self._ask(verb_table.DRAIN, request, Readiness)

    async def down(self, request: Down = Down()) -> TakenDown:
        """Drain the fleet and stop all of it; returns when everything has ended."""
        return await self._ask(verb_table.DOWN, request, TakenDown)

    async def urls(self) -> FleetUrls:
        """Where to send requests."""
        from skyctl.core.urls import FleetUrls

        return await self._ask(verb_table.URLS, None, FleetUrls)

    async def processes(self) -> Processes:
        """The processes that skyctl has started, as recorded."""
        from skyctl.core.results import Processes

        return await self._ask(verb_table.PROCESSES, None, Processes)

    async def logs(self, request: LogQuery = LogQuery()) -> dict[str, tuple[str, ...]]:
        """The ends of the logs, by name. Raises NotFoundError for an unknown name."""
        return await self._ask(verb_table.LOGS, request, dict[str, tuple[str, ...]])
