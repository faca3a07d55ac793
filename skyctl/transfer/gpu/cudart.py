"""The few CUDA runtime calls of the read pipeline, straight through ctypes.

With a dozen reader threads the interpreter lock is the limit, not the copy engine: torch's own
calls hold it for tens of microseconds, and a call that releases it waits up to 0.1 ms to get it
back. So calls that return at once keep it, and those that wait release it.
"""

from __future__ import annotations

import ctypes
from functools import cache

HOST_TO_DEVICE = 1
EVENT_DISABLE_TIMING = 2
_NOT_READY = 600


class CudaError(RuntimeError):
    """A CUDA runtime call returned an error code."""


@cache
def _runtime(*, waits: bool = False) -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded into this process."""
    import torch

    major = (torch.version.cuda or "13").split(".")[0]
    library = (ctypes.CDLL if waits else ctypes.PyDLL)(f"libcudart.so.{major}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cudaMemcpyAsync.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    library.cudaEventCreateWithFlags.argtypes = [ctypes.POINTER(pointer), ctypes.c_uint]
    library.cudaEventRecord.argtypes = [pointer, pointer]
    library.cudaEventQuery.argtypes = [pointer]
    library.cudaEventSynchronize.argtypes = [pointer]
    library.cudaEventDestroy.argtypes = [pointer]
    library.cudaStreamSynchronize.argtypes = [pointer]
    library.cudaSetDevice.argtypes = [ctypes.c_int]
    library.cudaGetErrorString.argtypes = [ctypes.c_int]
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int, what: str) -> None:
    if code:
        text = _runtime().cudaGetErrorString(code).decode()
        raise CudaError(f"{what}: {text} (CUDA error {code})")


def set_device(index: int) -> None:
    """Bind the calling thread to one GPU."""
    _check(_runtime().cudaSetDevice(index), "cudaSetDevice")


def copy_to_device(device_address: int, host_address: int, size: int, stream: int) -> None:
    """Start copying `size` bytes from pinned host memory; returns before the copy is done."""
    code = _runtime().cudaMemcpyAsync(device_address, host_address, size, HOST_TO_DEVICE, stream)
    _check(code, "cudaMemcpyAsync")


class Event:
    """A CUDA event without timing. Create it on the thread (and so the device) that records it."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        code = _runtime().cudaEventCreateWithFlags(ctypes.byref(self._handle), EVENT_DISABLE_TIMING)
        _check(code, "cudaEventCreate")

    def record(self, stream: int) -> None:
        _check(_runtime().cudaEventRecord(self._handle, stream), "cudaEventRecord")

    def synchronize(self) -> None:
        code = _runtime().cudaEventQuery(self._handle)
        if code == _NOT_READY:
            code = _runtime(waits=True).cudaEventSynchronize(self._handle)
        _check(code, "cudaEventSynchronize")

    def destroy(self) -> None:
        _runtime().cudaEventDestroy(self._handle)
