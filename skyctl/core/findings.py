"""What a judge of a fleet says: one finding for each thing that is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """error: something fails, or will; warning: something to check; ok: nothing to do."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Condition(StrEnum):
    """What is the matter with a server, its supervisor, or a command that keeps others out."""

    HEALTHY = "healthy"
    BUSY = "busy"
    """Another state follows by itself."""
    FROZEN = "frozen"
    """A push paused it, sent nothing, and did not resume it."""
    WOKEN = "woken"
    """A push woke its weights, and did not put them to sleep again."""
    HALF_UPDATED = "half-updated"
    WRONG_VERSION = "wrong-version"
    QUARANTINED = "quarantined"
    STUCK = "stuck"
    """Its front end answers, its engine does not."""
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    UNSUPERVISED = "unsupervised"
    ORPHANED = "orphaned"
    """Its server is gone and left processes behind."""
    STALE = "stale"
    """Its record is of an earlier boot of the machine."""
    HALF_DOWN = "half-down"
    """A `skyctl down` was cut short."""
    OTHER_VERSION = "other-version"
    """Its supervisor is of another version of skyctl."""
    STOPPED = "stopped"
    """A process that others wait for is stopped (SIGSTOP)."""
    REQUESTED = "requested"
    """It was paused or put to sleep, a push has it, or it starts or stops for the first time."""
    NOT_RUNNING = "not-running"
    """It has no process."""
    MIXED = "mixed"
    """Servers hold different versions."""
    OTHER_LABEL = "other-label"
    """It reports a version that this fleet did not give it."""
    UNRECORDED = "unrecorded"
    """The fleet's state cannot be written."""
    OTHER_SETTINGS = "other-settings"
    """It is not what the fleet file says, or does not serve the fleet's adapters."""
    OTHER_INTENT = "other-intent"
    """It runs, is paused or sleeps, and was meant to do something else."""
    OFF_BASE = "off-base"
    """The Tinker API trains other weights than its adapters are sampled over."""
    NOT_ROUTED = "not-routed"
    """It is ready, and the router does not list it."""
    MISROUTED = "misrouted"
    """The router lists it, and requests that reach it fail or wait."""


class Action(StrEnum):
    """What recovery does about a condition."""

    NOTHING = "nothing"
    RESUME = "resume"
    SLEEP = "sleep"
    PUSH = "push"
    RESTART = "restart"
    QUARANTINE = "quarantine"
    ADOPT = "adopt"
    END = "end"
    DOWN = "down"
    REPLACE = "replace"
    LOAD = "load"

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return self is not Action.NOTHING

    @property
    def releases(self) -> bool:
        """Whether it gives a server back that has its weights whole."""
        return self in (Action.RESUME, Action.SLEEP)

    @property
    def replaces(self) -> bool:
        """Whether it ends the process, or takes it from its users until it is ended."""
        return self in (Action.RESTART, Action.QUARANTINE)


_TITLES = {"router": "the router", "tinker": "the Tinker API", "holder": "the fleet is busy:"}


@dataclass(frozen=True)
class Finding:
    """What is not as it should be, or not yet: `status`, `doctor` and `recover` show it."""

    server: str
    """Its name, or that of a front; "" for the fleet as a whole."""
    condition: Condition
    """What is the matter with it."""
    detail: str = ""
    """More about it, to follow the name of the server."""
    action: Action = Action.NOTHING
    """What recovery does about it."""
    hint: str = ""
    """What to type about it; "" if it ends by itself."""
    severity: Severity = Severity.ERROR
    """Whether something is wrong; ok for what was requested."""

    @property
    def message(self) -> str:
        """The whole sentence."""
        return f"{_TITLES.get(self.server, self.server)} {self.detail}".lstrip()

    @property
    def fault(self) -> bool:
        """Whether something is wrong."""
        return self.severity is Severity.ERROR

    @property
    def explained(self) -> str:
        """The detail, and what to type if recovery does nothing about it."""
        return self.detail if self.action.needed or not self.hint else f"{self.detail}; {self.hint}"

    def as_diagnosis(self) -> dict[str, Any]:
        """What `skyctl recover --json` prints."""
        return {
            "server": self.server,
            "found": self.condition,
            "detail": self.explained,
            "action": self.action,
        }

    def as_reason(self) -> dict[str, Any]:
        """What `skyctl status --json` prints of it as a reason."""
        return {"message": self.message, "hint": self.hint, "fault": self.fault}

    def as_drift(self) -> dict[str, str]:
        """What `skyctl status --json` prints of it as drift."""
        return {"subject": self.server, "message": self.detail, "hint": self.hint}
