"""What the sender of one machine reads goes on to those of the others, from GPU to GPU by NCCL.

Rank 0 reads, and broadcasts each chunk once it has been checked; the others receive it in their own
slot. NCCL is called through ctypes, in the library that torch has loaded: vLLM, whose communicator
the `nccl` transport takes, needs seconds to import.
"""

from __future__ import annotations

import base64
import ctypes
import threading
from functools import cache
from typing import Any

from skyctl.errors import PreflightError

_UINT8 = 1  # ncclDataType_t
_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class Relay:
    """A group of senders. It outlives a push, and is formed again when one of them was replaced."""

    def __init__(self, device: int) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device=device)
        self._communicator = ctypes.c_void_p()
        self._stands = threading.Event()

    def begin(self) -> None:
        """A push begins: nothing is passed on until the group is formed, or said to stand."""
        self._stands.clear()

    def stand(self) -> None:
        """The group of the last push has the same members."""
        self._stands.set()

    def form(self, rank: int, world_size: int, unique_id: str) -> None:
        """Join the group with this id; returns when all have joined."""
        library = _library()
        old, self._communicator = self._communicator, ctypes.c_void_p()
        if old:
            library.ncclCommAbort(old)  # others of it may have died
        identity = _UniqueId.from_buffer_copy(base64.b64decode(unique_id))
        _check(
            library.ncclCommInitRank(ctypes.byref(self._communicator), world_size, identity, rank)
        )
        self._stands.set()

    def pass_on(self, octets: Any) -> None:
        """Send these bytes of the GPU from rank 0 to all others, which receive as many; returns
        when they have been sent or received.
        """
        import torch

        self._stands.wait()
        with torch.cuda.device(self._device):  # a thread has its own current device
            address = octets.data_ptr()
            _check(
                _library().ncclBroadcast(
                    *(address, address, octets.numel(), _UINT8, 0),
                    *(self._communicator, self._stream.cuda_stream),
                )
            )
            self._stream.synchronize()


def new_group() -> str:
    """What identifies a group that this process is rank 0 of; NCCL listens for the other ranks."""
    identity = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(identity)))
    return base64.b64encode(bytes(identity)).decode("ascii")


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")  # by its name, as torch has loaded it
    except OSError as error:
        raise PreflightError(
            f"the sender cannot use NCCL: {error}", hint="set weight_transfer.readers to all"
        ) from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, _UniqueId, number]
    library.ncclBroadcast.argtypes = [
        *(pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer)
    ]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.argtypes = [number]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"NCCL: {_library().ncclGetErrorString(code).decode()}")
