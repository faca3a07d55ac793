"""Results of verbs that the state file holds, and of jobs: commands load them when they ask."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from skyctl.errors import ExitCode, SkyctlError, error_named
from skyctl.push.request import PushResult
from skyctl.store.journal import Job, JobState, PushRecord
from skyctl.store.kept_weights import KeptWeights
from skyctl.store.processes import ProcessRow
from skyctl.store.state import ServerRow


@dataclass(frozen=True)
class WeightsState:
    """What each server carries, as the last push recorded it, and the pushes, newest first.
    `base` is the directory that servers are started with, None if that is not known.
    """

    servers: tuple[ServerRow, ...]
    pushes: tuple[PushRecord, ...]
    base: str | None = None
    base_digest: str | None = None
    """The identity of that directory's files when the fleet came up, None if it is not known."""

    @property
    def version(self) -> str | None:
        """The version that every server has, "base" for what they were started with; None while
        they differ.
        """
        versions = {row.weight_version or "base" for row in self.servers}
        return versions.pop() if len(versions) == 1 else None


@dataclass(frozen=True)
class KeptVersion:
    """`current`: the fleet, or one of its servers, runs it. `exists`: its copy does."""

    kept: KeptWeights
    current: bool
    exists: bool

    def to_json(self) -> dict[str, Any]:
        return {**self.kept.to_json(), "current": self.current, "there": self.exists}


@dataclass(frozen=True)
class Processes:
    """Recorded child processes, their present or planned ports, and whether the fleet goes down."""

    rows: tuple[ProcessRow, ...] = ()
    ports: dict[str, int] = field(default_factory=dict)
    going_down: bool = False
    pins: dict[str, str] = field(default_factory=dict)
    """What the fleet's models mean until it goes down (`core/pinning.py`)."""


def job_error(job: Job) -> SkyctlError | None:
    """The error a job ended with; None if it succeeded."""
    if job.error is None:
        if job.state is not JobState.INTERRUPTED:
            return None
        return SkyctlError(f"{job.id} was interrupted", hint="how it left them: skyctl status")
    error = error_named(
        job.error["kind"],
        job.error["message"],
        hint=job.error.get("hint", ""),
        details=job.error.get("details"),
    )
    error.exit_code = ExitCode(job.error.get("exit_code", error.exit_code))
    return error


def push_result(job: Job) -> PushResult:
    """The result of a push that ended. Raises as `job_error` says."""
    if error := job_error(job):
        raise error
    assert job.result is not None  # it succeeded
    return PushResult.from_json(job.result)


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint that was written out of a running server."""

    directory: str
    """Where it is."""
    version: str | None
    """What the fleet serves; None for what it was started with."""
    server: str
    """The server that wrote it."""
    weights_digest: str
    """What this server computes with."""
    tensors: int
    """How many there are."""
    total_bytes: int
    """Their size."""
    seconds: float
    """How long it took, while users were served."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
