"""Asks the machine what a forecast needs to know, for a dry run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.launch.local.devices import free_gpu_memory
from skyctl.push.forecast import GPU_TRANSPORTS, Forecast, Subject, assumptions, forecast
from skyctl.push.measuring import measure_reading, measured_before
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.sender_gpu import free_for_sender
from skyctl.push.worker_memory import bytes_beside, copier_bytes, worker_bytes
from skyctl.transfer.plan import ChunkPlan
from skyctl.transfer.sender_pool import Lease
from skyctl.transfer.transports.choose import load_transport


async def subject_of(
    fleet: PushFleet,
    plan: ChunkPlan,
    transport: str,
    *,
    workers: int,
    idle: Lease | None,
    copied: bool = False,
) -> Subject:
    """What is to be pushed, and where it has to fit.

    An idle sender has its context already; servers that it filled keep what they took. `copied`:
    servers do not load it, but copy it into their parameters.
    """
    on_gpus = transport in GPU_TRANSPORTS
    free = await asyncio.to_thread(free_gpu_memory) if on_gpus else {}
    gpus = [server.gpus for server in fleet.servers]
    shares = load_transport(transport).shares_gpus
    reserve = 0
    if shares and not copied and not (idle and idle.filled):
        reserve = bytes_beside(transport, plan, gpus)
    if not copied:
        taken = await asyncio.to_thread(worker_bytes, transport, plan)
    else:
        taken = 0 if shares else copier_bytes(plan, gpus, free)
    return Subject(
        transport=transport,
        chunk_bytes=tuple(chunk.size for chunk in plan.chunks),
        workers=workers,
        worker_bytes=taken,
        free_gpu_bytes=free_for_sender(fleet.servers, transport, free),
        reserve_bytes=reserve,
        gpus=len(free),
        has_context=idle is not None,
        copied=copied,
    )


async def foretell(
    request: PushRequest, fleet: PushFleet, checkpoint: Checkpoint, subject: Subject
) -> tuple[tuple[Forecast, ...], tuple[str, ...]]:
    """What each way of staging would take, and what that stands on."""
    measured = replace(
        measured_before(fleet.pushes, subject.transport),
        reads=await asyncio.to_thread(measure_reading, checkpoint),
    )
    found = forecast(subject, request.stage, measured)
    return tuple(found), tuple(assumptions(subject, measured))
