"""The requests and results of a fleet's verbs: dataclasses, which pydantic carries over the wire.

Paths are those of the machine that the fleet runs on. All times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skyctl.http.fanout import Outcome
from skyctl.push.request import PushRequest
from skyctl.push.trainer import Rendezvous, SendTarget
from skyctl.states import PauseMode
from skyctl.store.identity import ProcessIdentity

Outcomes = tuple[Outcome[Any], ...]
"""One per server, in the fleet's order."""


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
    """Free memory. Level 1 keeps the weights in host memory, 2 discards them. `hands_to`: the fleet
    of this `sleep_group` that may wake then; running requests have `drain_timeout_s` to end.
    """

    verb = "sleep"
    level: int = 1
    hands_to: str = ""
    sleep_group: str = ""
    drain_timeout_s: float = 0.0

    def describe(self) -> str:
        to = f", for {self.hands_to}" if self.hands_to else ""
        return f"sleep (level {self.level}{to})"


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
class CancelJob:
    """A job that is to end."""

    job: str


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
    """What was typed."""
    key: str
    """Names the offer."""
    numbers: dict[str, dict[str, int]]
    """By layout and name."""
    group: dict[str, Any] | None = None
    """Where ranks and workers meet if ranks send (`wire/peer_group.py`)."""
    forms: bool = False
    """They have not met yet."""


@dataclass(frozen=True)
class Withdraw:
    """An offer whose trainer pushes no more."""

    key: str


ALL_LINES = 1_000_000


@dataclass(frozen=True)
class EventQuery:
    """The latest `limit` lines of the fleet's history: of those with a `sequence` above `after`,
    and not older than `since` (seconds since the epoch).
    """

    limit: int = 100
    after: int = 0
    since: float = 0.0


@dataclass(frozen=True)
class Forget:
    """A version whose copies are to be deleted."""

    version: str


@dataclass(frozen=True)
class SaveWeights:
    """Write what the servers run into a new `directory`; of this `version`, unless it is ""."""

    directory: str
    version: str = ""


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
class Drain:
    """Whether load balancers in front are to send nothing more."""

    on: bool = True


@dataclass(frozen=True)
class Readiness:
    """Whether load balancers in front are to send requests; `reason` says why not."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True)
class Down:
    """`drain_timeout_s` None: the fleet file's. `wait_s` bounds the whole wait."""

    drain_timeout_s: float | None = None
    wait_s: float = 600.0


@dataclass(frozen=True)
class LogQuery:
    """The ends of logs, or the end of what was written in a period."""

    names: tuple[str, ...] = ()
    """Of which: a server, `router`, `tinker` or `supervisor`; all if empty."""
    lines: int = 50
    """How many of each."""
    probes: bool = False
    """Including the access-log lines of health probes."""
    since: float = 0.0
    """From then on, in seconds since the epoch."""
    until: float | None = None
    """Up to then."""


@dataclass(frozen=True)
class OpenedUpdate:
    """A push that waits for its trainer to send to these servers; none if it has ended."""

    job: str
    servers: tuple[SendTarget, ...] = ()
    holder: str = ""
    """Whose freeze it is, to their guards: the trainer's calls carry it."""


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
