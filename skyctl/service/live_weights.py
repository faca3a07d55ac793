"""Push weights straight out of a trainer's memory: write them down once, then push that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.checkpoints.live import NamedTensors, dtype_name, running_model, write_tensors
from skyctl.checkpoints.staging import staged, sweep

if TYPE_CHECKING:
    from skyctl.push.request import PushRequest
    from skyctl.service import FleetService
    from skyctl.store.journal import Job, JobEvent


async def push_tensors(
    fleet: FleetService,
    tensors: NamedTensors,
    request: PushRequest,
    *,
    dtype: object = None,
    on_event: Callable[[JobEvent], None] = lambda event: None,
    timeout_s: float | None = None,
) -> Job:
    """Push named tensors; the job as it ended. `request.checkpoint` is filled in here.

    They are written to a private directory first, which holds them until the fleet has others, so
    that a replica that restarts gets them too. `timeout_s` bounds the wait for the push itself.

    Raises:
        PreflightError, UsageError: the tensors are not the model's; nothing was touched.
        ConflictError: another push is in progress.
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
    """
    wanted = dtype_name(dtype)
    running = await asyncio.to_thread(running_model, await fleet.model_path())
    directory = await _swept(fleet)  # room first
    try:
        with staged(directory, needed_bytes=running.total_bytes) as checkpoint:
            await write_tensors(tensors, checkpoint, running=running, dtype=wanted)
            job_id = await fleet.start_push(replace(request, checkpoint=str(checkpoint)))
            return await fleet.wait_job(job_id, on_event, timeout_s)
    finally:
        await _swept(fleet)


async def _swept(fleet: FleetService) -> Path:
    """Where weights are staged, with nothing there that is of no use any more."""
    staging = await fleet.staging()
    await asyncio.to_thread(sweep, staging.directory, staging.needed)
    return staging.directory
