"""What a push needs of this machine: a GPU for the sender, how fast files are read, free memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.errors import PreflightError
from skyctl.launch.base import Node
from skyctl.launch.local.devices import discover_gpus, free_gpu_memory, visible_gpus
from skyctl.push.forecast import GPU_TRANSPORTS, Forecast, Measured, Subject, assumptions, forecast
from skyctl.push.layouts import LayoutChoice
from skyctl.push.request import PushFleet, PushRequest, PushServer
from skyctl.push.worker_memory import (
    broadcast_bytes,
    bytes_beside,
    copier_bytes,
    numbering_bytes,
    worker_bytes,
    workers_on_fullest,
)
from skyctl.transfer.plan import ChunkPlan
from skyctl.transfer.sender_pool import Lease
from skyctl.transfer.transports.base import Transport

if TYPE_CHECKING:
    from skyctl.store.journal import PushRecord

_SAMPLE_BYTES = 128 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_SAMPLE_S = 0.5
_LEAST_S = 1e-4


def free_for_sender(
    servers: Sequence[PushServer], sender_gpu: int, free: Mapping[int, int]
) -> int | None:
    """Free bytes on the fullest GPU that the sender would use, those of the servers if `sender_gpu`
    is -1; None if unknown. `free` are the bytes of each GPU by its index.
    """
    of_servers = [gpu for server in servers for gpu in server.gpus]
    used = [sender_gpu] if sender_gpu >= 0 else of_servers
    return min((free[gpu] for gpu in used if gpu in free), default=None)


async def free_gpu(servers: Sequence[PushServer]) -> tuple[Node | None, int]:
    """A GPU that no server uses, for the sender of an NCCL push, and its machine: one of theirs, or
    else this one (None). In a Ray cluster Ray chooses both, once the sender starts.

    Raises:
        PreflightError: all GPUs are taken.
        HostUnreachable: a machine cannot be asked.
    """
    nodes = [*dict.fromkeys(server.node for server in servers if server.node), None]
    if nodes[0] is not None and nodes[0].ray is not None:
        return nodes[0].with_a_gpu, 0
    gpus_by_node = dict(zip(nodes, await asyncio.gather(*map(_gpus_of, nodes)), strict=True))
    used = {(server.node, gpu) for server in servers for gpu in server.gpus}
    free = [
        (node, gpu)
        for node, gpus in gpus_by_node.items()
        for gpu in gpus
        if (node, gpu) not in used
    ]
    if not free:
        reason = "all are taken" if any(gpus_by_node.values()) else "nvidia-smi names none"
        raise PreflightError(
            f"transport nccl needs a GPU that no server uses, and {reason}",
            hint="use `weight_transfer: {transport: ipc}` in the fleet file",
        )
    return free[0]


_gpus_by_node: dict[Node | None, tuple[int, ...]] = {}
"""GPUs by machine, None for this one: asking takes longer than the rest of the preflight."""


async def _gpus_of(node: Node | None) -> tuple[int, ...]:
    """The GPUs that a machine lets us use."""
    if not _gpus_by_node.get(node):  # a driver that did not answer is asked again
        if node is None:
            _gpus_by_node[node] = await asyncio.to_thread(_gpus_of_this_machine)
        else:
            from skyctl.launch.remote.session import FACTS_TIMEOUT_S, ask

            answer = await ask(node, {"do": "facts", "ports": 0}, FACTS_TIMEOUT_S)
            _gpus_by_node[node] = tuple(gpu["index"] for gpu in answer["gpus"])
    return _gpus_by_node[node]


def _gpus_of_this_machine() -> tuple[int, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to us."""
    return tuple(gpu.index for gpu in visible_gpus(discover_gpus(), os.environ))


def measured_before(pushes: Iterable[PushRecord], transport: str) -> Measured:
    """Rates of the newest push by `transport` that succeeded on all its servers at once."""
    for push in pushes:
        result = push.result
        if not push.ok or result.get("transport") != transport:
            continue
        if "drain" in result.get("stages", {}):
            continue  # its servers left the router: its freeze includes the parts, or a trial
        update_s = float(result.get("stages", {}).get("update", 0.0))
        freeze_s = float(result.get("freeze_window_s", 0.0))
        if update_s > _LEAST_S and freeze_s > update_s and result.get("total_bytes"):
            return Measured(
                fixed_s=freeze_s - update_s, loads=result["total_bytes"] / update_s, source=push.job
            )
    return Measured()


def measure_reading(checkpoint: Checkpoint) -> float | None:
    """Bytes per second at which the first shards can be read now, measured for at most half a
    second.

    None if they are too small to tell. What is in the page cache is read from there, as the push
    would.
    """
    buffer = memoryview(bytearray(_PIECE_BYTES))
    done, began = 0, time.perf_counter()
    for shard in checkpoint.shards:
        with Path(shard.path).open("rb", buffering=0) as file:
            while done < _SAMPLE_BYTES and time.perf_counter() - began < _SAMPLE_S:
                got = file.readinto(buffer)
                if not got:
                    break
                done += got
    taken_s = time.perf_counter() - began
    return done / taken_s if done >= _PIECE_BYTES and taken_s > _LEAST_S else None


async def subject_of(
    fleet: PushFleet,
    plan: ChunkPlan,
    transport: Transport,
    layout: LayoutChoice,
    *,
    workers: int,
    idle: Lease | None,
    sender_gpu: int,
) -> Subject:
    """What is to be pushed, and where it has to fit.

    An idle sender already has its context; servers that it filled keep what they took.
    """
    on_gpus, shares = transport.name in GPU_TRANSPORTS, transport.shares_gpus
    copied, spare_bytes = layout.name == "runtime", layout.spare_bytes
    programs = {p.layout: p for ranks in layout.programs.values() for p in ranks}.values()
    on_this_machine = not any(
        server.node for server in fleet.servers
    )  # other machines' GPUs are not seen
    free = await asyncio.to_thread(free_gpu_memory) if on_gpus and on_this_machine else {}
    gpus = [server.gpus for server in fleet.servers]
    reserve = 0
    if shares and copied:
        reserve = spare_bytes * workers_on_fullest(gpus)
    elif shares and not (idle and idle.filled):
        reserve = bytes_beside(transport.name, plan, gpus)
    if not copied:
        buckets = transport.packing == "bucket"
        taken = await asyncio.to_thread(worker_bytes, transport.name, plan, buckets=buckets)
    else:
        taken = spare_bytes if shares else copier_bytes(plan, gpus, free)
    return Subject(
        transport=transport.name,
        chunk_bytes=tuple(chunk.size for chunk in plan.chunks),
        workers=workers,
        worker_bytes=taken,
        free_gpu_bytes=free_for_sender(fleet.servers, sender_gpu, free),
        reserve_bytes=reserve,
        numbering_bytes=numbering_bytes(programs),
        gpus=len(free),
        has_context=idle is not None,
        copied=copied,
        grouped=shares or not copied or taken == broadcast_bytes(plan),
    )


async def forecast_push(
    request: PushRequest, fleet: PushFleet, checkpoint: Checkpoint, subject: Subject
) -> tuple[tuple[Forecast, ...], tuple[str, ...]]:
    """What each way of staging would take, and what the figures are based on."""
    measured = replace(
        measured_before(fleet.pushes, subject.transport),
        reads=await asyncio.to_thread(measure_reading, checkpoint),
    )
    forecasts = forecast(subject, request.stage, measured)
    return tuple(forecasts), tuple(assumptions(subject, measured))
