"""The verbs of a fleet: one entry each, with the types of its request and its result.

Clients send a verb and its request; `core/handlers.py` has what answers it. A result is only
a type here: a push starts before the modules that display it are loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from skyctl.adapters.requests import LoadAdapter, UnloadAdapter
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
    OpenUpdate,
    Pause,
    PushLive,
    Recover,
    Restart,
    Resume,
    SaveWeights,
    Scale,
    Sleep,
    StatusQuery,
    Wake,
    Withdraw,
)
from skyctl.live.offer import Offer
from skyctl.push.request import PushRequest
from skyctl.push.trainer import Rendezvous

if TYPE_CHECKING:
    from skyctl.adapters.fleet import AdapterChange
    from skyctl.core.findings import Finding
    from skyctl.core.following import JobChanges
    from skyctl.core.recovery import Recovered
    from skyctl.core.requests import OpenedUpdate, Outcomes, Readiness, Staging, TakenDown
    from skyctl.core.results import KeptVersion, Processes, SavedWeights, WeightsState
    from skyctl.core.status import FleetStatus
    from skyctl.core.urls import FleetUrls
    from skyctl.live.offer import Offered
    from skyctl.push.trainer import SendTarget
    from skyctl.push.verify import Verification
    from skyctl.store.adapters import AdapterVersion
    from skyctl.store.journal import Job
    from skyctl.store.state import Event

Q = TypeVar("Q")
R = TypeVar("R")

CALL_TIMEOUT_S = 15.0
_VERB_GRACE_S = 45.0  # beyond a verb's deadline: states read back, a rollback, a router that hangs
SETTLE_WAIT_S = 60.0
"""How long a push waits for a supervisor that is still taking the fleet over, or repairing what the
last push left.
"""
_VERIFY_S = 600.0
_SAVE_S = 3600.0
_ASK_S = 60.0
_DAY_S = 86_400.0


def _within(patience_s: float) -> Callable[[object], float]:
    return lambda request: patience_s


def _control_s(request: Control) -> float:
    drain_s = request.drain_timeout_s if isinstance(request, Sleep) else 0.0
    return (request.timeout_s or _VERIFY_S) + drain_s + _VERB_GRACE_S


def _adapter_s(request: LoadAdapter | UnloadAdapter) -> float:
    return 4 * (request.timeout_s or _ASK_S) + _VERB_GRACE_S


def _recover_s(request: Recover) -> float:
    return (_DAY_S if request.timeout_s is None else request.timeout_s) + _VERB_GRACE_S


_called = _within(CALL_TIMEOUT_S)
_begun = _within(SETTLE_WAIT_S + CALL_TIMEOUT_S)
_observed = _within(_ASK_S)
_verified = _within(_VERIFY_S)
_saved = _within(_SAVE_S)  # also of what waits until a copy is written


@dataclass(frozen=True, eq=False)
class Verb(Generic[Q, R]):
    """A verb that takes a Q and answers with an R."""

    name: str
    request: type[Q]
    patience_s: Callable[[Q], float] = _called
    """How long its answer may take."""


STATUS: Final[Verb[StatusQuery, FleetStatus]] = Verb("status", StatusQuery)
PAUSE: Final[Verb[Pause, Outcomes]] = Verb("pause", Pause, _control_s)
RESUME: Final[Verb[Resume, Outcomes]] = Verb("resume", Resume, _control_s)
SLEEP: Final[Verb[Sleep, Outcomes]] = Verb("sleep", Sleep, _control_s)
WAKE: Final[Verb[Wake, Outcomes]] = Verb("wake", Wake, _control_s)
START_PUSH: Final[Verb[PushRequest, str]] = Verb("start_push", PushRequest, _saved)
OPEN_UPDATE: Final[Verb[OpenUpdate, OpenedUpdate]] = Verb("open_update", OpenUpdate, _saved)
CLOSE_UPDATE: Final[Verb[CloseUpdate, None]] = Verb("close_update", CloseUpdate)
OFFER: Final[Verb[Offer, Offered]] = Verb("offer", Offer, _saved)
PUSH_LIVE: Final[Verb[PushLive, str]] = Verb("push_live", PushLive, _saved)
WITHDRAW: Final[Verb[Withdraw, None]] = Verb("withdraw", Withdraw, _begun)
RENDEZVOUS: Final[Verb[Rendezvous, tuple[SendTarget, ...]]] = Verb(
    "rendezvous", Rendezvous, _observed
)
JOBS: Final[Verb[None, tuple[Job, ...]]] = Verb("jobs", NoneType)
JOB_CHANGES: Final[Verb[JobQuery, JobChanges]] = Verb(
    "job_changes", JobQuery, lambda request: request.wait_s + CALL_TIMEOUT_S
)
CANCEL_JOB: Final[Verb[CancelJob, None]] = Verb("cancel_job", CancelJob)
EVENTS: Final[Verb[EventQuery, tuple[Event, ...]]] = Verb("events", EventQuery)
WEIGHTS: Final[Verb[None, WeightsState]] = Verb("weights", NoneType)
VERIFY_WEIGHTS: Final[Verb[None, Verification]] = Verb("verify_weights", NoneType, _verified)
SAVE_WEIGHTS: Final[Verb[SaveWeights, SavedWeights]] = Verb("save_weights", SaveWeights, _saved)
KEPT_VERSIONS: Final[Verb[None, tuple[KeptVersion, ...]]] = Verb("kept_versions", NoneType)
FORGET_VERSION: Final[Verb[Forget, int]] = Verb("forget_version", Forget, _observed)
MODEL_PATH: Final[Verb[None, str | None]] = Verb("model_path", NoneType)
STAGING: Final[Verb[None, Staging]] = Verb("staging", NoneType)
ADAPTERS: Final[Verb[None, tuple[AdapterVersion, ...]]] = Verb("adapters", NoneType)
LOAD_ADAPTER: Final[Verb[LoadAdapter, AdapterChange]] = Verb(
    "load_adapter", LoadAdapter, _adapter_s
)
UNLOAD_ADAPTER: Final[Verb[UnloadAdapter, AdapterChange]] = Verb(
    "unload_adapter", UnloadAdapter, _adapter_s
)
FINDINGS: Final[Verb[None, tuple[Finding, ...]]] = Verb("findings", NoneType, _observed)
RECOVER: Final[Verb[Recover, tuple[Recovered, ...]]] = Verb("recover", Recover, _recover_s)
RESTART: Final[Verb[Restart, int]] = Verb("restart", Restart)
SCALE: Final[Verb[Scale, int]] = Verb("scale", Scale, _observed)
CANARY: Final[Verb[CanaryRequest, CanaryStatus]] = Verb("canary", CanaryRequest, _saved)
DRAIN: Final[Verb[Drain, Readiness]] = Verb("drain", Drain)
DOWN: Final[Verb[Down, TakenDown]] = Verb("down", Down, lambda request: request.wait_s)
URLS: Final[Verb[None, FleetUrls]] = Verb("urls", NoneType)
PROCESSES: Final[Verb[None, Processes]] = Verb("processes", NoneType)
LOGS: Final[Verb[LogQuery, dict[str, tuple[str, ...]]]] = Verb("logs", LogQuery)


@dataclass(frozen=True)
class Handler:
    """What answers a verb."""

    verb: Verb[Any, Any]
    method: Callable[..., Awaitable[Any]]

    async def answer(self, request: Any) -> Any:
        """The result; a verb without a request takes None."""
        return await (self.method() if self.verb.request is NoneType else self.method(request))


Handlers = dict[Verb[Any, Any], Handler]


@overload
def handle(verb: Verb[None, R], method: Callable[[], Awaitable[R]]) -> Handler: ...
@overload
def handle(verb: Verb[Q, R], method: Callable[[Q], Awaitable[R]]) -> Handler: ...
def handle(verb: Verb[Any, Any], method: Callable[..., Awaitable[Any]]) -> Handler:
    """A handler whose method takes and returns what its verb has."""
    return Handler(verb, method)


def by_verb(*answering: Handler) -> Handlers:
    """These handlers, by their verbs."""
    return {handler.verb: handler for handler in answering}
