"""Everything that can be asked of a fleet: one method per verb, a request in, a result out.

    FleetService              forwards its verbs: subclasses implement `_ask`
    ├── RemoteFleet           a supervisor, by its HTTP API (`supervisor/client.py`)
    │   └── SupervisedFleet   … of this machine, restarted when it is gone (`service/`)
    └── RecordedFleet         the state file (`core/recorded.py`)
        ├── UnsupervisedFleet … of a fleet whose supervisor is gone (`service/`)
        ├── AttachedFleet     … and servers by URL (`service/`)
        └── Supervisor        … and servers of its own (`supervisor/`)

Requests and results are dataclasses, which pydantic carries over the wire unchanged. A result's
type is imported by the verb that returns it: a push starts before the modules that display it are
loaded. Paths are those of the machine that the fleet runs on. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from skyctl.http.fanout import Outcome
from skyctl.live.offer import Offer, Offered
from skyctl.push.request import PushRequest
from skyctl.push.trainer import Rendezvous, SendTarget
from skyctl.states import PauseMode
from skyctl.store.identity import ProcessIdentity

if TYPE_CHECKING:
    from skyctl.adapters.requests import AdapterChange, LoadAdapter, UnloadAdapter
    from skyctl.core.findings import Finding
    from skyctl.core.following import JobChanges
    from skyctl.core.recovery import Recovered
    from skyctl.core.results import KeptVersion, Processes, WeightsState
    from skyctl.core.status import FleetStatus
    from skyctl.core.urls import FleetUrls
    from skyctl.push.verify import Verification
    from skyctl.store.adapters import AdapterVersion
    from skyctl.store.journal import Job, JobEvent
    from skyctl.store.state import Event

T = TypeVar("T")
Outcomes = tuple[Outcome[Any], ...]
"""One per server, in the fleet's order."""

CALL_TIMEOUT_S = 15.0
_VERB_GRACE_S = 45.0  # beyond a verb's deadline: states read back, a rollback, a router that hangs
SETTLE_WAIT_S = 60.0
"""How long a push waits for a supervisor that is still taking the fleet over, or repairing what the
last push left.
"""
_VERIFY_S = 600.0
_ASK_S = 60.0
_DAY_S = 86_400.0

# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StatusQuery:
    """Without `fresh`, which is cheaper, a pause that was not made through skyctl shows only with
    the supervisor's next health probe. `operation`: report that operation, if it has ended.
    """

    fresh: bool = True
    operation: int | None = None


@dataclass(frozen=True, kw_only=True)
class Control:
    """What pause, resume, sleep and wake share: the servers (all if empty), and the deadline of
    each server's call (None: the fleet file's).
    """

    verb: ClassVar[str]
    servers: tuple[str, ...] = ()
    timeout_s: float | None = None

    def describe(self) -> str:
        """The verb for the fleet's history, with its options: `pause (mode keep)`."""
        return self.verb


@dataclass(frozen=True, kw_only=True)
class Pause(Control):
    """Stop generation. If some servers cannot pause, the others resume, unless `keep_partial`."""

    verb = "pause"
    mode: PauseMode = "abort"
    clear_cache: bool = True
    keep_partial: bool = False

    def describe(self) -> str:
        return f"pause (mode {self.mode})"


@dataclass(frozen=True, kw_only=True)
class Resume(Control):
    """Generate again. Servers that are asleep or quarantined are skipped and say so. `force`: also
    what another fleet froze.
    """

    verb = "resume"
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Sleep(Control):
    """Free memory. Level 1 keeps the weights in host memory, 2 discards them."""

    verb = "sleep"
    level: int = 1

    def describe(self) -> str:
        return f"sleep (level {self.level})"


@dataclass(frozen=True, kw_only=True)
class Wake(Control):
    """Take memory back, all of it or only `tags` (weights, kv_cache)."""

    verb = "wake"
    tags: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"wake ({', '.join(self.tags)})" if self.tags else "wake"


@dataclass(frozen=True)
class JobQuery:
    """A job with its events of a sequence number above `after`. With `wait_s`, only changes:
    answered when there are any, or after that time (`core/following.py`).
    """

    job: str
    after: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class OpenUpdate:
    """A push whose weights a trainer sends itself: from `at`, as `process`, within `timeout_s`
    (None: the fleet file's time for an update).
    """

    push: PushRequest
    at: Rendezvous
    process: ProcessIdentity | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class CloseUpdate:
    """The trainer's report: everything is sent, or why not. `version` is the label of the weights
    of an update that was begun without one. `passed_on`: the fleet itself has passed weights on to
    every server, so that unchanged ones are the same once more.
    """

    job: str
    failure: str = ""
    version: str = ""
    passed_on: bool = False


@dataclass(frozen=True)
class PushLive:
    """A push of what a trainer offered under `key`, with the numbers that parameters must have
    afterwards: by layout and name.
    """

    push: PushRequest
    key: str
    numbers: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Withdraw:
    """An offer whose trainer pushes no more."""

    key: str


@dataclass(frozen=True)
class EventQuery:
    """The latest lines of the fleet's history."""

    limit: int = 100


@dataclass(frozen=True)
class Forget:
    """A version whose copies are to be deleted."""

    version: str


@dataclass(frozen=True)
class Recover:
    """`timeout_s` bounds the wait; a supervisor's recovery goes on after it."""

    timeout_s: float | None = None


@dataclass(frozen=True)
class Restart:
    """Replicas to restart one after the other, all if empty."""

    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scale:
    replicas: int


@dataclass(frozen=True)
class Down:
    """`drain_timeout_s` None: the fleet file's. `wait_s` bounds the whole wait."""

    drain_timeout_s: float | None = None
    wait_s: float = 600.0


@dataclass(frozen=True)
class LogQuery:
    """The last `lines` of the logs of these (a server, `router`, `supervisor`), all if empty; with
    `probes`, including the access-log lines of health probes.
    """

    names: tuple[str, ...] = ()
    lines: int = 50
    probes: bool = False


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedUpdate:
    """A push that waits for its trainer to send to these servers; none if it has ended."""

    job: str
    servers: tuple[SendTarget, ...] = ()


@dataclass(frozen=True)
class Staging:
    """Where weights from memory are written, the checkpoints there that must stay, and where
    `adapters` from memory are written. `in_memory`: a tmpfs of this machine will do as well.
    """

    directory: Path
    needed: frozenset[str]
    adapters: Path
    in_memory: bool = True


@dataclass(frozen=True)
class TakenDown:
    """What `down` did. `stopped` names what ran; `supervised` says whether a supervisor did it."""

    stopped: tuple[str, ...]
    supervised: bool


# --- the verbs ------------------------------------------------------------------------------------


class FleetService:
    """One fleet. A verb that needs a running fleet raises FleetDownError if there is none."""

    async def _ask(
        self, verb: str, request: object, result: type[T], *, patience_s: float = CALL_TIMEOUT_S
    ) -> T:
        """The verb's result, from whatever implements it, within `patience_s` seconds."""
        raise NotImplementedError(verb)

    async def control(self, request: Control) -> Outcomes:
        """The common part of pause, resume, sleep and wake."""
        patience_s = (request.timeout_s or _VERIFY_S) + _VERB_GRACE_S
        return await self._ask(request.verb, request, Outcomes, patience_s=patience_s)

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        """Every replica and the router, with a verdict; also of a fleet that is down."""
        from skyctl.core.status import FleetStatus

        return await self._ask("status", request, FleetStatus)

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
        return await self._ask(
            "start_push", request, str, patience_s=SETTLE_WAIT_S + CALL_TIMEOUT_S
        )

    async def open_update(self, request: OpenUpdate) -> OpenedUpdate:
        """Begin a push whose weights a trainer sends itself; returns once the servers are frozen
        and wait for them. Raises as `start_push`.
        """
        from skyctl.push.tracing import current_traceparent

        traced = replace(request.push, traceparent=current_traceparent())
        return await self._ask(
            "open_update", replace(request, push=traced), OpenedUpdate, patience_s=_VERIFY_S
        )

    async def close_update(self, request: CloseUpdate) -> None:
        """Report that an update is sent, or will not be; a no-op once it is over."""
        return await self._ask("close_update", request, type(None))

    async def offer(self, request: Offer) -> Offered:
        """Plan how servers copy out of a trainer's memory, and remember it for its pushes; an
        earlier offer is forgotten. Nothing is copied.

        Raises:
            PreflightError: they cannot; says why.
            ConflictError: another command acts on the fleet.
        """
        return await self._ask("offer", request, Offered, patience_s=_ASK_S)

    async def push_live(self, request: PushLive) -> str:
        """Begin a push of what was offered, and return its job's id. Raises as `start_push`.

        Raises:
            NotFoundError: nothing was offered under this key, or another offer came.
        """
        from skyctl.push.tracing import current_traceparent

        traced = replace(request.push, traceparent=current_traceparent())
        return await self._ask(
            "push_live",
            replace(request, push=traced),
            str,
            patience_s=SETTLE_WAIT_S + CALL_TIMEOUT_S,
        )

    async def withdraw(self, request: Withdraw) -> None:
        """Have the servers let go of the memory of a trainer that ends; a no-op if they have.

        Raises:
            ConflictError: another command acts on the fleet; its end does the same.
        """
        return await self._ask("withdraw", request, type(None))

    async def rendezvous(self, request: Rendezvous) -> tuple[SendTarget, ...]:
        """What a trainer must know of each server to send to it. Changes nothing.

        Raises:
            PreflightError: a server takes no weights. ServerError: one does not answer.
        """
        return await self._ask("rendezvous", request, tuple[SendTarget, ...], patience_s=_ASK_S)

    async def jobs(self) -> tuple[Job, ...]:
        """The latest jobs, newest first."""
        from skyctl.store.journal import Job

        return await self._ask("jobs", None, tuple[Job, ...])

    async def job_changes(self, request: JobQuery) -> JobChanges:
        """A job and what happened in it. With `wait_s`, also raises FleetDownError if the process
        that ran it died. Raises NotFoundError.
        """
        from skyctl.core.following import JobChanges

        return await self._ask(
            "job_changes", request, JobChanges, patience_s=request.wait_s + CALL_TIMEOUT_S
        )

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
            FleetDownError: the process that ran it died.
        """
        from skyctl.core.following import CHANGES_WAIT_S, follow

        async def changes(after: int) -> JobChanges:
            return await self.job_changes(JobQuery(job_id, after, CHANGES_WAIT_S))

        return await follow(job_id, changes, on_event, timeout_s=timeout_s)

    async def events(self, request: EventQuery = EventQuery()) -> tuple[Event, ...]:
        """The latest lines of the fleet's history, oldest first."""
        from skyctl.store.state import Event

        return await self._ask("events", request, tuple[Event, ...])

    async def weights(self) -> WeightsState:
        """What each server carries (as recorded by the last push), and the pushes."""
        from skyctl.core.results import WeightsState

        return await self._ask("weights", None, WeightsState)

    async def verify_weights(self) -> Verification:
        """Compare what servers hold with each other, the record and the fleet's checkpoint."""
        from skyctl.push.verify import Verification

        return await self._ask("verify_weights", None, Verification, patience_s=_VERIFY_S)

    async def kept_versions(self) -> tuple[KeptVersion, ...]:
        """The versions of which the fleet keeps its own copy, newest first."""
        from skyctl.core.results import KeptVersion

        return await self._ask("kept_versions", None, tuple[KeptVersion, ...])

    async def forget_version(self, request: Forget) -> int:
        """Delete the copies of a version; returns the bytes of weights that were in them.

        Raises:
            NotFoundError: it is not kept.
            ConflictError: the fleet runs it, or a push is in progress.
            UsageError: it may be any of several.
        """
        return await self._ask("forget_version", request, int, patience_s=_ASK_S)

    async def model_path(self) -> str | None:
        """Directory or hub id of what the servers run now; None if they do not say."""
        return await self._ask("model_path", None, str | None)  # type: ignore[arg-type]

    async def staging(self) -> Staging:
        """Where a process on the fleet's machine writes weights that are to be pushed."""
        return await self._ask("staging", None, Staging)

    async def adapters(self) -> tuple[AdapterVersion, ...]:
        """The LoRA adapters that the fleet serves, as recorded."""
        from skyctl.store.adapters import AdapterVersion

        return await self._ask("adapters", None, tuple[AdapterVersion, ...])

    async def load_adapter(self, request: LoadAdapter) -> AdapterChange:
        """Serve a LoRA adapter on every server (see `skyctl.adapters.change.load`)."""
        return await self._change_adapter("load_adapter", request)

    async def unload_adapter(self, request: UnloadAdapter) -> AdapterChange:
        """Stop serving a LoRA adapter."""
        return await self._change_adapter("unload_adapter", request)

    async def _change_adapter(
        self, verb: str, request: LoadAdapter | UnloadAdapter
    ) -> AdapterChange:
        from skyctl.adapters.requests import AdapterChange

        patience_s = 4 * (request.timeout_s or _ASK_S) + _VERB_GRACE_S
        return await self._ask(verb, request, AdapterChange, patience_s=patience_s)

    async def findings(self) -> tuple[Finding, ...]:
        """What is wrong with each server, observed now. Changes nothing."""
        from skyctl.core.findings import Finding

        return await self._ask("findings", None, tuple[Finding, ...], patience_s=_ASK_S)

    async def recover(self, request: Recover = Recover()) -> tuple[Recovered, ...]:
        """Repair what can be; one report per server.

        Raises:
            ConflictError: another command acts on the fleet.
            DeadlineExceeded: it has not ended in time; a supervisor's goes on.
        """
        from skyctl.core.recovery import Recovered

        patience_s = (_DAY_S if request.timeout_s is None else request.timeout_s) + _VERB_GRACE_S
        return await self._ask("recover", request, tuple[Recovered, ...], patience_s=patience_s)

    async def restart(self, request: Restart = Restart()) -> int:
        """Begin a rolling restart; returns the operation's number.

        Raises:
            NotFoundError: no such server. ConflictError: the supervisor is busy.
            UsageError: skyctl did not start these servers.
        """
        return await self._ask("restart", request, int)

    async def scale(self, request: Scale) -> int:
        """Begin to run this many servers; returns the operation's number, 0 if there is nothing to
        do.

        Raises:
            UsageError: the fleet file lists replica groups, or the count is not positive.
        """
        return await self._ask("scale", request, int, patience_s=_ASK_S)

    async def down(self, request: Down = Down()) -> TakenDown:
        """Drain the fleet and stop all of it; returns when everything has ended."""
        return await self._ask("down", request, TakenDown, patience_s=request.wait_s)

    async def urls(self) -> FleetUrls:
        """Where to send requests."""
        from skyctl.core.urls import FleetUrls

        return await self._ask("urls", None, FleetUrls)

    async def processes(self) -> Processes:
        """The processes that skyctl has started, as recorded."""
        from skyctl.core.results import Processes

        return await self._ask("processes", None, Processes)

    async def logs(self, request: LogQuery = LogQuery()) -> dict[str, tuple[str, ...]]:
        """The ends of the logs, by name. Raises NotFoundError for an unknown name."""
        return await self._ask("logs", request, dict[str, tuple[str, ...]])
