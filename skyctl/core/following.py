"""Following a job to its end, from the process that runs it or from another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from skyctl.core.arbiter import Arbiter
from skyctl.errors import DeadlineExceeded, FleetDownError
from skyctl.store.journal import EventKind, Job, JobEvent
from skyctl.store.state import FleetState

FOLLOW_POLL_S = 0.2
"""Seconds between a follower's updates. The end arrives at once if the process that runs the job
answers; a follower that reads another process's journal polls it this often.
"""
CHANGES_WAIT_S = 20.0
"""How long a follower is kept waiting when nothing happens."""


@dataclass(frozen=True)
class JobChanges:
    """What happened in a job after some event, oldest first.

    It is `released` when it has ended and its owner has released the fleet: a follower may push
    again then. Until then `job` has no stage and no servers: these are in its events.
    """

    job: Job
    events: tuple[JobEvent, ...]
    released: bool


Changes = Callable[[int], Awaitable[JobChanges]]
"""Waits for events after the one with this number; returns none if little happens."""


async def job_changes(
    state: FleetState, job_id: str, after: int = 0, *, wait_s: float = 0.0
) -> JobChanges:
    """Events after the one with this number, waited for up to `wait_s` seconds.

    Raises:
        NotFoundError: there is no such job.
        FleetDownError: the process that ran it died.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + wait_s
    while True:
        latest = _changes(state, job_id, after)
        left_s = until - clock()
        if latest.released or left_s <= 0:
            return latest
        bytes_before = latest.job.done_bytes
        if await state.locks.news.wait(min(FOLLOW_POLL_S, left_s)):
            continue  # some job has ended, perhaps this one
        latest = _changes(state, job_id, after)
        if latest.released or latest.events or latest.job.done_bytes != bytes_before:
            return latest


def _changes(state: FleetState, job_id: str, after: int) -> JobChanges:
    alive = state.journal.owner_alive(job_id)
    job = state.journal.job(job_id, in_full=False)
    events = tuple(state.journal.events(job_id, after=after))
    if job.ended:
        released = not Arbiter(state.locks).holds(job.id)
        return JobChanges(state.journal.job(job_id) if released else job, events, released)
    if not alive:
        raise FleetDownError(
            f"the process that ran {job_id} died in stage {state.journal.job(job_id).stage}",
            hint="see what it left: skyctl status; put it right: skyctl recover",
        )
    return JobChanges(job, events, False)


async def follow(
    job_id: str,
    changes: Changes,
    on_event: Callable[[JobEvent], None],
    *,
    timeout_s: float | None = None,
) -> Job:
    """Follow a job until it is released: past events first, then each new one, and bytes as they
    are sent (`progress`, which is not in the journal).

    Raises:
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
        FleetDownError: the process that ran it died.
    """
    seen, done_bytes, stage = 0, -1, "queued"
    try:
        async with asyncio.timeout(timeout_s) as patience:
            while True:
                latest = await changes(seen)
                events, job = list(latest.events), latest.job
                if job.total_bytes and job.done_bytes != done_bytes:
                    done_bytes = job.done_bytes
                    data = {"done_bytes": done_bytes, "total_bytes": job.total_bytes}
                    # after the stage it belongs to, before the end
                    at = (
                        len(events) - 1
                        if events and events[-1].kind is EventKind.END
                        else len(events)
                    )
                    events.insert(at, JobEvent(seen, time.time(), EventKind.PROGRESS, data))
                for event in events:
                    seen = max(seen, event.sequence)
                    stage = event.data["stage"] if event.kind is EventKind.STAGE else stage
                    on_event(event)
                if latest.released:
                    return job
                if job.ended:  # its release follows in an instant
                    patience.reschedule(None)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{job_id} has not ended after {timeout_s:g} s; it goes on in stage {stage}",
            hint=f"wait again: skyctl jobs wait {job_id}",
        ) from error
