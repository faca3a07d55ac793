"""Is NCCL there for vLLM? It does not say so by itself.

vLLM's `PyNcclCommunicator` catches every error of loading libnccl (a library that is missing, or
one too old for a function that it wants) and turns itself off: each broadcast then returns at once,
nothing has moved, and workers load what their buffers happened to hold.
"""

from __future__ import annotations


def nccl_problem() -> str:
    """Why vLLM in this process cannot use NCCL; "" when it can. Imports vLLM."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except Exception as error:  # OSError: no library; AttributeError: it lacks a function
        return f"vLLM cannot use NCCL, and would move nothing: {error}"
    return ""
