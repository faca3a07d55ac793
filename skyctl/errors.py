"""Every error skyctl raises on purpose, and the exit codes they end in.

SkyctlError                     1   something failed; the message says what, where, what to type
├── UsageError                  2   the command line or the fleet file is wrong; nothing was touched
│   └── FleetFileError          2   … with the file and line
├── PartialFailure              3   some servers succeeded, some did not: an outcome of each
├── NotFoundError               4   no such fleet, replica, job or checkpoint
│   └── FleetDownError          4   the fleet exists but is not running (or its state is stale)
├── ServerError                 1   a server answered, and the answer was an error
│   ├── ServerUnreachable       1   no connection, or it broke
│   └── DeadlineExceeded      124   no answer within the deadline
├── HostUnreachable             1   a machine of the fleet does not say what runs on it
├── ConflictError               1   another command or process has the lock, port or name
│   └── VersionMismatch         1   the fleet's supervisor is of another skyctl
├── WeightsGone                 1   the files of a version are not what they were
├── StateUnwritable             1   what must be on record first cannot be: the disk is full …
├── PreflightError              1   a push was refused before anything was paused
│   └── NotMapped               1   … because servers cannot map the trainer's memory
├── Interrupted               130   Ctrl-C
├── InternalError               1   a bug in skyctl
└── PushError                   1   a push failed after it began; has the state of each server
    └── TrialFailed             1   … because its trial did: nothing of it is served
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of every skyctl command (docs/reference/exit-codes.md)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    NOT_FOUND = 4
    DEADLINE = 124
    INTERRUPTED = 130


class SkyctlError(Exception):
    """Base of all errors a user is meant to read.

    `message` is one line: what failed and where. `hint` is what to type or change next.
    `details` is a JSON-serialisable mapping that `--json` adds to the error envelope.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(
        self, message: str, *, hint: str = "", details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details or {}

    @property
    def kind(self) -> str:
        """Stable machine-readable name of the error, as `--json` prints it."""
        return type(self).__name__

    def to_json(self) -> dict[str, str]:
        """The error in `--json`, without its details and exit code."""
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


class UsageError(SkyctlError):
    """The command line or a file the user wrote is wrong; nothing was touched."""

    exit_code = ExitCode.USAGE


class FleetFileError(UsageError):
    """A fleet file is missing, unreadable or invalid. The message starts with `path:line:`."""


class PartialFailure(SkyctlError):
    """Some servers succeeded and some did not. `outcomes` holds one per server, in fleet order."""

    exit_code = ExitCode.PARTIAL

    def __init__(
        self,
        message: str,
        *,
        outcomes: Sequence[Any] = (),
        hint: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.outcomes = list(outcomes)


class NotFoundError(SkyctlError):
    """No such fleet, replica, job or checkpoint."""

    exit_code = ExitCode.NOT_FOUND


class FleetDownError(NotFoundError):
    """The fleet is known but not running."""


class ServerError(SkyctlError):
    """A server answered with an error. `status` is the HTTP status, 0 without one; `refusal` is the
    error's meaning (`engines/base.py`), "" for errors that need no special handling.
    """

    refusal: str = ""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        hint: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.status = status


class ServerUnreachable(ServerError):
    """The server could not be connected to, or the connection broke before an answer."""


class DeadlineExceeded(ServerError):
    """No answer within the deadline; whether the server acted is unknown."""

    exit_code = ExitCode.DEADLINE


class HostUnreachable(SkyctlError):
    """A machine that servers run on does not answer; whether they still run is unknown."""


class ConflictError(SkyctlError):
    """Another command or process has the lock, the port or the name; the message says which."""


class VersionMismatch(ConflictError):
    """The fleet's supervisor was started by another version of skyctl."""


class WeightsGone(SkyctlError):
    """The files that a version was pushed from are gone, or hold something else now."""


class StateUnwritable(SkyctlError):
    """The fleet's state cannot be written (full, read-only or failing disk), but must be before
    anything is touched.
    """


class PreflightError(SkyctlError):
    """A push was refused before anything was paused."""


class NotMapped(PreflightError):
    """A server answered that it cannot map the trainer's memory, or cannot join its group."""


class PushError(SkyctlError):
    """A push failed after it began. `details["servers"]` says how each server was left."""


class TrialFailed(PushError):
    """New weights did not answer as expected, and are not served. `details["trial"]` has every
    answer."""


def no_server(fleet: str, name: str, servers: Iterable[str]) -> NotFoundError:
    """The error of a server's name that the fleet does not have, with those that it has."""
    return NotFoundError(
        f"fleet {fleet} has no server {name!r}", hint=f"its servers are: {', '.join(servers)}"
    )


def error_named(
    kind: str, message: str, *, hint: str = "", details: dict[str, Any] | None = None
) -> SkyctlError:
    """The error of this tree with that name (`kind` in JSON); SkyctlError for any other name."""
    error_type = globals().get(kind)
    if not (isinstance(error_type, type) and issubclass(error_type, SkyctlError)):
        error_type = SkyctlError
    error: SkyctlError = error_type(message, hint=hint, details=details)
    return error


class Interrupted(SkyctlError):
    """The user pressed Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


class InternalError(SkyctlError):
    """A bug in skyctl; its traceback goes to stderr."""
