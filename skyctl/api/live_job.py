"""The job of a live push. Until it has ended, servers read the ranks' memory: who is late, or is
cancelled, waits for its end all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from skyctl.core.requests import CancelJob, PushLive
from skyctl.core.results import job_error
from skyctl.core.service import FleetService
from skyctl.errors import DeadlineExceeded, SkyctlError
from skyctl.kill_points import reached
from skyctl.store.journal import Job, JobEvent


async def push_to_its_end(
    fleet: FleetService,
    push: PushLive,
    on_event: Callable[[JobEvent], None],
    timeout_s: float | None,
) -> Job:
    """The ended job of this push.

    Raises:
        DeadlineExceeded: it had not ended after `timeout_s` seconds, and was cancelled. It has
            ended by now: the message says how, as does a note of a CancelledError.
        SkyctlError: as `FleetService.push_live` and `FleetService.wait_job`.
    """
    starting = asyncio.ensure_future(fleet.push_live(push))
    try:
        job = await asyncio.shield(starting)
        reached("rank.started")
        return await fleet.wait_job(job, on_event, timeout_s)
    except asyncio.CancelledError as error:
        outcome, _ = await _uninterrupted(_cancelled(fleet, starting))
        error.add_note(outcome)
        raise
    except DeadlineExceeded as error:
        outcome, details = await _uninterrupted(_cancelled(fleet, starting))
        late = error.message.partition("; it goes on")[0]
        raise DeadlineExceeded(f"{late}; {outcome}", details=details) from error


async def _cancelled(
    fleet: FleetService, starting: asyncio.Future[str]
) -> tuple[str, dict[str, Any]]:
    """Cancel a push; how it has ended, and the details of its error."""
    try:
        job_id = await starting
        with suppress(SkyctlError):  # it is waited for in any case
            await fleet.cancel_job(CancelJob(job_id))
        job = await fleet.wait_job(job_id)
    except SkyctlError as error:
        return f"how it ended is not known: {error.message}", {}
    if failure := job_error(job):
        return f"it was cancelled: {failure.message}", failure.details
    return f"it was cancelled too late: the fleet has {(job.result or {}).get('version')}", {}


async def _uninterrupted(
    work: Coroutine[Any, Any, tuple[str, dict[str, Any]]],
) -> tuple[str, dict[str, Any]]:
    """Its result, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    return task.result()
