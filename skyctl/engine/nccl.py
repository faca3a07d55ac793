"""What vLLM leaves out about NCCL: whether it is there at all, and the end of a group.

vLLM's `PyNcclCommunicator` catches every error of loading libnccl (a library that is missing, or
one too old for a function that it wants) and turns itself off: each broadcast then returns at once,
nothing has moved, and workers load what their buffers happened to hold.
"""

from __future__ import annotations

from typing import Any


def nccl_problem() -> str:
    """Why vLLM in this process cannot use NCCL; "" when it can. Imports vLLM."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except Exception as error:  # OSError: no library; AttributeError: it lacks a function
        return f"vLLM cannot use NCCL, and would move nothing: {error}"
    return ""


def leave_group(engine: Any) -> None:
    """End the group that a weight-transfer engine is in, if any, and free its buffers on the GPU.

    Joining the next one does not: each time a sender was replaced, half a gigabyte stayed behind
    in every worker (vLLM 0.32, `nccl_engine.py`: the old communicator is only forgotten).
    """
    group = getattr(engine, "model_update_group", None)
    if group is not None:
        engine.model_update_group = None
        group.destroy()
