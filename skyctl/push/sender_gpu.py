"""Which GPU the sender takes, and what is free where it has its slots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache

from skyctl.errors import PreflightError
from skyctl.launch.local.devices import discover_gpus, visible_gpus
from skyctl.push.request import PushServer


def free_for_sender(
    servers: Sequence[PushServer], transport: str, free: Mapping[int, int]
) -> int | None:
    """Free bytes on the fullest GPU that the sender would use; None where none was asked.

    `free` are the bytes of each GPU by its index.
    """
    used = [gpu for server in servers for gpu in server.gpus]
    sender = [free_gpu(servers)] if transport == "nccl" else used
    return min((free[gpu] for gpu in sender if gpu in free), default=None)


def free_gpu(servers: Sequence[PushServer]) -> int:
    """A GPU that no server uses, for the sender of an NCCL push.

    Raises:
        PreflightError: all GPUs are taken.
    """
    used = {gpu for server in servers for gpu in server.gpus}
    free = [gpu for gpu in _gpus_of_this_machine() if gpu not in used]
    if not free:
        raise PreflightError(
            "transport nccl needs a GPU that no server uses, and all are taken",
            hint="use `weight_transfer: {transport: ipc}` in the fleet file",
        )
    return free[0]


@cache
def _gpus_of_this_machine() -> tuple[int, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves to us.

    Asked once: it takes longer than the rest of the preflight together.
    """
    return tuple(gpu.index for gpu in visible_gpus(discover_gpus(), os.environ))
