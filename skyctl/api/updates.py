"""Weights straight from a trainer: written from its memory and then pushed; or sent by its own
engine while the fleet is frozen (an update).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from skyctl.checkpoints.live import NamedTensors, dtype_name, running_model, write_tensors
from skyctl.checkpoints.staging import staged, sweep
from skyctl.core.service import CloseUpdate, FleetService, OpenUpdate, Staging
from skyctl.core.urls import control_token
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.trainer import SendTarget, suggest
from skyctl.service.ended import push_result
from skyctl.store.identity import own_identity
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
    """Push named tensors; returns the ended job. `request.checkpoint` is filled in here.

    They are written to a private directory first, which holds them until the fleet has others, so
    that a replica that restarts gets them too. `timeout_s` bounds the wait for the push itself.

    Raises:
        PreflightError, UsageError: the tensors are not the model's; nothing was touched.
        ConflictError: another push is in progress.
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
    """
    wanted = dtype_name(dtype)
    running = await asyncio.to_thread(running_model, await fleet.model_path())
    place = await _swept(fleet)  # make room first
    try:
        with staged(
            place.directory, needed_bytes=running.total_bytes, in_memory=place.in_memory
        ) as checkpoint:
            await write_tensors(tensors, checkpoint, running=running, dtype=wanted)
            job_id = await fleet.start_push(replace(request, checkpoint=str(checkpoint)))
            return await fleet.wait_job(job_id, on_event, timeout_s)
    finally:
        await _swept(fleet)


async def _swept(fleet: FleetService) -> Staging:
    """Where weights are staged, cleared of what is no longer needed."""
    staging = await fleet.staging()
    await asyncio.to_thread(sweep, staging.directory, staging.needed)
    return staging


@dataclass
class Update:
    """Servers that are frozen and wait for the weights `version`.

    `headers` belong to every call to them. `result` is set once the block was left.
    """

    version: str
    job: str
    servers: tuple[SendTarget, ...]
    headers: dict[str, str] = field(repr=False)
    master_address: str
    master_port: int
    result: PushResult | None = None

    @property
    def world_size(self) -> int:
        """The sender and the workers of all servers."""
        return self.servers[0].world_size


@asynccontextmanager
async def updating(
    fleet: FleetService,
    request: PushRequest,
    *,
    on_event: Callable[[JobEvent], None],
    timeout_s: float | None,
) -> AsyncIterator[Update]:
    """`Fleet.update`, for a connected fleet."""
    urls = await fleet.urls()
    at, token = suggest(urls.servers.values()), control_token(urls.access)
    opened = await fleet.open_update(OpenUpdate(request, at, own_identity(), timeout_s))

    async def ended(failure: str = "") -> PushResult:
        closing = asyncio.create_task(fleet.close_update(CloseUpdate(opened.job, failure)))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # servers are frozen, and wait for this
            raise
        return push_result(await fleet.wait_job(opened.job, on_event))

    if not opened.servers:
        await ended()
    update = Update(
        request.weight_version or "",
        opened.job,
        opened.servers,
        {"Authorization": f"Bearer {token}"} if token else {},
        at.master_address,
        at.master_port,
    )
    try:
        yield update
    except BaseException as error:
        try:
            await ended(f"the trainer failed: {error!r}")
        except Exception as left:
            error.add_note(str(left))
        raise
    update.result = await ended()
