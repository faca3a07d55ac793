"""The result of an ended job, or the error that it is raised as."""

from __future__ import annotations

from skyctl.errors import ExitCode, SkyctlError, error_named
from skyctl.push.request import PushResult
from skyctl.store.journal import Job, JobState


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
