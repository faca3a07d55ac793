"""What a push will take, for each way of staging it: arithmetic over what is known. Pure.

    stage    slots of the sender                 read before the freeze    read within it
    gpu      one per chunk, on its GPUs          all of it                 nothing
    host     one per chunk, in host memory       all of it                 nothing
    stream   a ring                              the ring                  the rest

Sizes follow from the chunk plan. Times follow from rates measured here: the fleet's own pushes by
the same transport, and a sample of the files. Without a measurement, no time is given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from skyctl.transfer.reader import PINNED_BYTES, SHARE_OF_FREE, fits_whole
from skyctl.units import format_bytes, format_rate

Stage = Literal["auto", "gpu", "host", "stream"]
GPU_TRANSPORTS = ("nccl", "ipc")
CPU_TRANSPORTS = ("shm", "gloo")
RING = 2
"""Minimum slots of a ring: one is filled while servers load the other."""
_MIB = 1024 * 1024
SENDER_CONTEXT = {"ipc": 686 * _MIB, "nccl": 1466 * _MIB}
"""GPU memory of a sender without slots: CUDA context with kernels, and with NCCL its library and
group. Measured on H200 (the driver's choice, so it differs slightly between GPUs).
"""
_SENDER_PROCESS = {"ipc": 475 * _MIB, "nccl": 860 * _MIB}
"""Host memory of the sender's process without its ring, measured on the same machines."""
_GROUP_GPU, _GROUP_HOST = 780 * _MIB, 230 * _MIB
"""What NCCL has of both where the sender is in a group with its servers."""
_DRIVER_PER_GPU = 50 * _MIB
"""Host memory that the driver takes for a process, for each GPU of the machine."""
WORKER_HOST = {"ipc": 80 * _MIB, "nccl": 340 * _MIB}
"""Host memory that a worker takes in its first push."""


@dataclass(frozen=True)
class Measured:
    """Rates of this fleet, in bytes per second; None where not measured.

    `fixed_s` is the part of a freeze that does not depend on the size: pause, init, start, finish,
    verify, resume. `loads` is how fast servers load what is ready. `source` names the push. `reads`
    is how fast the files are read into host memory now.
    """

    fixed_s: float | None = None
    loads: float | None = None
    reads: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Forecast:
    """One way of staging. Memory in bytes, beyond what servers hold that have taken no push yet."""

    stage: str
    """gpu, host or stream."""
    chosen: bool
    """The push would stage this way."""
    slots: int
    """The sender's slots."""
    sender_gpu_bytes: int
    """On each GPU of the sender, at most."""
    worker_gpu_bytes: int
    """On each worker's GPU, beside its model."""
    host_bytes: int
    """On this machine, at most."""
    freeze_s: float | None
    """How long servers would be frozen; None: unknown."""
    problem: str = ""
    """Why it is impossible; "" if it is not."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """What is to be pushed, and where it has to fit."""

    transport: str
    """How it travels."""
    chunk_bytes: tuple[int, ...]
    """The chunks' sizes."""
    workers: int
    """The workers of all servers."""
    worker_bytes: int = 0
    """What each takes on its GPU (`push/worker_memory.py`)."""
    free_gpu_bytes: int | None = None
    """Free on the fullest of the sender's GPUs; None if unknown."""
    reserve_bytes: int = 0
    """What workers take of that where they load on the sender's GPUs."""
    numbering_bytes: int = 0
    """What the sender takes beside its slots."""
    gpus: int = 0
    """GPUs in the machine."""
    has_context: bool = False
    """A sender is alive, and its CUDA context is already excluded from what is free."""
    copied: bool = False
    """Servers copy the weights into their parameters instead of loading them."""
    grouped: bool = True
    """An `nccl` sender broadcasts to them; otherwise it stages on their GPUs what it stages
    as a whole."""

    def has_group(self, stage: str) -> bool:
        """Whether the sender is in a group with the servers, where its transport has one."""
        return self.grouped or stage != "gpu"

    def context_bytes(self, stage: str) -> int:
        """GPU memory of the sender without slots."""
        context = SENDER_CONTEXT.get(self.transport, 0)
        return context if self.has_group(stage) else context - _GROUP_GPU


def waiting_bytes(transport: str) -> tuple[int, int]:
    """Memory of a sender that waits for a push: on each of its GPUs, and in host memory; zeros for
    transports whose senders end with their push.
    """
    if transport not in GPU_TRANSPORTS:
        return 0, 0
    return SENDER_CONTEXT[transport], PINNED_BYTES + _SENDER_PROCESS[transport]


def slots_of(stage: str, chunks: int) -> int:
    """How many slots the sender is asked for; with `auto` a GPU sender may take one per chunk."""
    return chunks if stage in ("gpu", "host") else min(RING, chunks)


def refusal(stage: str, transport: str) -> str:
    """Why a transport cannot be staged this way; "" if it can."""
    if stage == "auto":
        return ""
    if transport not in (*GPU_TRANSPORTS, *CPU_TRANSPORTS):
        return f"servers read by themselves with transport {transport}: nothing is staged"
    if stage == "gpu" and transport not in GPU_TRANSPORTS:
        return f"transport {transport} goes through host memory"
    if stage == "host" and transport not in CPU_TRANSPORTS:
        return f"transport {transport} sends from GPU memory"
    return ""


def forecast(subject: Subject, requested: str, measured: Measured) -> list[Forecast]:
    """One forecast per way of staging that the transport supports; `chosen` marks the one the push
    takes.
    """
    stages = [s for s in ("gpu", "host", "stream") if not refusal(s, subject.transport)]
    whole = sum(subject.chunk_bytes)
    free = subject.free_gpu_bytes
    taken = subject.reserve_bytes + subject.numbering_bytes
    if not subject.has_context:
        taken += subject.context_bytes("gpu")
    fits = free is not None and fits_whole(whole, free, taken)
    chosen = requested
    if requested == "auto":
        chosen = "gpu" if "gpu" in stages and fits else "stream"
    forecasts = []
    for stage in stages:
        problem = ""
        if stage == "gpu" and free is not None and not fits:
            problem = f"{format_bytes(whole)} do not fit: {format_bytes(free)} are free"
            problem += f", and {format_bytes(taken)} of them are needed beside it" if taken else ""
        ring = RING
        if stage == "stream" and requested == "auto" and free is not None and subject.copied:
            ring = max(RING, int((free - taken) * SHARE_OF_FREE) // max(subject.chunk_bytes))
        forecasts.append(_forecast(subject, stage, stage == chosen, problem, measured, ring))
    return forecasts


def assumptions(subject: Subject, measured: Measured) -> list[str]:
    """What the figures are based on, and what is missing, in words."""
    lines = []
    if measured.loads is not None and measured.fixed_s is not None:
        lines.append(
            f"servers load {format_rate(measured.loads / 1e9)} and the rest of a freeze takes "
            f"{measured.fixed_s:.3f} s, as in {measured.source}"
        )
    else:
        lines.append(
            f"no push by {subject.transport} into this fleet was measured yet: freeze not known"
        )
    if measured.reads is not None:
        lines.append(
            f"files are read at {format_rate(measured.reads / 1e9)} into host memory, measured now"
        )
    else:
        lines.append("the files are too small to tell how fast they are read")
    if subject.copied:
        lines.append(
            "servers copy into their parameters; where one cannot, vLLM's loader needs more"
        )
    if subject.transport in GPU_TRANSPORTS and subject.free_gpu_bytes is None:
        lines.append("the sender's GPU was not asked for its free memory")
    return lines


def _forecast(
    subject: Subject, stage: str, chosen: bool, problem: str, measured: Measured, ring: int
) -> Forecast:
    largest, chunks = max(subject.chunk_bytes), len(subject.chunk_bytes)
    slots = slots_of(stage, chunks) if stage != "stream" else min(ring, chunks)
    slot_bytes = sum(subject.chunk_bytes) if stage == "gpu" else slots * largest
    on_gpu = subject.transport in GPU_TRANSPORTS
    host_bytes = slot_bytes + subject.workers * largest
    sender_gpu_bytes = 0
    if on_gpu:
        sender_gpu_bytes = slot_bytes + subject.numbering_bytes + subject.context_bytes(stage)
        host_bytes = PINNED_BYTES + _SENDER_PROCESS[subject.transport]
        host_bytes += subject.gpus * _DRIVER_PER_GPU
        if subject.has_group(stage):
            host_bytes += subject.workers * WORKER_HOST[subject.transport]
        else:
            host_bytes -= _GROUP_HOST
    return Forecast(
        stage=stage,
        chosen=chosen,
        slots=slots,
        sender_gpu_bytes=sender_gpu_bytes,
        worker_gpu_bytes=subject.worker_bytes,
        host_bytes=host_bytes,
        freeze_s=None if problem else _freeze_s(subject, stage, measured, ring),
        problem=problem,
    )


def _freeze_s(subject: Subject, stage: str, measured: Measured, ring: int) -> float | None:
    """The time to load what is ready; where part is still to be read, that of the slower of the
    two.
    """
    if measured.loads is None or measured.fixed_s is None:
        return None
    whole = sum(subject.chunk_bytes)
    load_s = whole / measured.loads
    if stage != "stream":
        return measured.fixed_s + load_s
    ahead = sum(subject.chunk_bytes[:ring])
    if ahead == whole:
        return measured.fixed_s + load_s
    if measured.reads is None:
        return None
    return measured.fixed_s + max(load_s, (whole - ahead) / measured.reads)
