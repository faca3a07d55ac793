"""What vLLM leaves out about NCCL: whether it is present at all, and leaving a group.

vLLM's `PyNcclCommunicator` catches every error of loading libnccl (a missing library, or one too
old for a function that it needs) and disables itself: each broadcast then returns at once, nothing
has moved, and workers load what their buffers happened to hold.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

_PREFIX = "NCCL_"


def nccl_settings() -> dict[str, str]:
    """NCCL's variables as they apply to a group that this process shares with another.

    With VLLM_BATCH_INVARIANT vLLM sets a dozen of them for itself. It lifts them while it joins a
    sender's group, where NCCL can read them again (2.29.7; vLLM 0.32, `utils/nccl.py`); where it
    cannot, they apply to that group too, which hangs unless the sender has the same.
    """
    lifted: AbstractContextManager[Any] = nullcontext()
    with suppress(ImportError):  # an older vLLM, which does not lift them
        from vllm.utils.nccl import unpinned_nccl_env

        lifted = unpinned_nccl_env()
    with lifted:
        return {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}


def nccl_problem() -> str:
    """Why vLLM in this process cannot use NCCL; "" if it can. Imports vLLM."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except Exception as error:  # OSError: no library; AttributeError: it lacks a function
        return f"vLLM cannot use NCCL, and would move nothing: {error}"
    return ""


def new_unique_id() -> bytes:
    """What identifies a group that this process is rank 0 of; NCCL listens for its ranks."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def leave_group(engine: Any) -> None:
    """Leave the group that a weight-transfer engine is in, if any, and free its buffers on the GPU.

    Joining the next group does not: each time a sender was replaced, half a gigabyte stayed behind
    in every worker (vLLM 0.32, `nccl_engine.py`: the old communicator is only forgotten).
    """
    group = getattr(engine, "model_update_group", None)
    if group is not None:
        engine.model_update_group = None
        group.destroy()
