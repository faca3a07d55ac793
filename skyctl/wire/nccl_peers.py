"""NCCL between a trainer's ranks and servers' workers, by its C interface: both have torch, and
with it NCCL, but perhaps not the same torch, and a trainer has no vLLM.

The communicator does not block: a member that has died ends no other's wait by itself, so every
wait here has a deadline, after which the communicator is aborted.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from skyctl.wire.group_store import GroupStore, GroupStoreClient
from skyctl.wire.peer_group import Meeting, Messages, PeerGroup

_POLL_S = 0.0005
_SPIN_S = 0.002
"""What is only enqueued takes less: it is not slept for."""
_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_VERSION = struct.Struct(">i")
_CONFIG_VERSION = 21400  # the first with a configuration; later NCCL takes its shorter form


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [
        *(ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT, ctypes.POINTER(_Config))
    ],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(_INT)],
    "ncclCommAbort": [_POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [_POINTER, ctypes.c_size_t, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, ctypes.c_size_t, _INT, _INT, _POINTER, _POINTER],
}


class Nccl:
    """The library that torch has loaded. Raises RuntimeError: there is none, or it is too old."""

    def __init__(self) -> None:
        try:
            self._library = _library()
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = _INT, arguments
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"NCCL cannot be used: {error}") from error

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function. Raises RuntimeError, unless it has succeeded or is in progress."""
        code = int(getattr(self._library, name)(*arguments))
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise RuntimeError(f"{name}: {self.reason(code)}")
        return code

    def reason(self, code: int) -> str:
        """What an error's number stands for."""
        text: bytes = self._library.ncclGetErrorString(code)
        return text.decode(errors="replace")

    def version(self) -> int:
        """As NCCL writes it: 22809 is 2.28.9."""
        number = _INT()
        self.call("ncclGetVersion", ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """Identifies a group that this process is the first member of."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


def _library() -> ctypes.CDLL:
    """What torch has loaded, or would: its wheel comes with it as a package. Raises OSError."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError:
        package = find_spec("nvidia")
        for place in package.submodule_search_locations or () if package is not None else ():
            if (path := Path(place) / "nccl" / "lib" / "libnccl.so.2").is_file():
                return ctypes.CDLL(str(path))
        raise


class NcclPeers(PeerGroup):
    """One member on one GPU, with a stream of its own."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        device: torch.device,
        store: GroupStore | GroupStoreClient,
    ) -> None:
        self._nccl = Nccl()
        self._device = device
        self._meet_s, self._transfer_s = meeting.meet_timeout_s, meeting.transfer_timeout_s
        self._communicator = _POINTER()
        self._abort = threading.Lock()
        """For what uses the communicator: none of it waits, and aborting frees it."""
        unique_id = self._meet(store, rank, meeting.members)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, _CONFIG_VERSION, 0)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            try:
                self._nccl.call(
                    "ncclCommInitRankConfig",
                    *(ctypes.byref(self._communicator), meeting.members),
                    *(_UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)),
                )
                self._wait_enqueued(time.monotonic() + self._meet_s)
            except BaseException:
                self.close()
                raise

    @contextmanager
    def context(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def transfer(self, sends: Messages, receives: Messages) -> None:
        stream = _POINTER(self._stream.cuda_stream)
        with torch.cuda.device(self._device):
            with self._opened() as communicator, self._grouped():
                for name, messages in (("ncclRecv", receives), ("ncclSend", sends)):
                    for member, message in messages:
                        place = _POINTER(message.data_ptr())
                        size, to = message.numel(), (member, communicator, stream)
                        self._nccl.call(name, place, size, _UINT8, *to)
            self._wait_enqueued(time.monotonic() + self._transfer_s)

    def finish(self) -> None:
        done, until = self._stream.record_event(), time.monotonic() + self._transfer_s
        while not done.query():
            self._require_alive(until)
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Whatever waits in this group ends."""
        with self._abort:
            communicator, self._communicator = self._communicator, _POINTER()
        if communicator:
            self._nccl.call("ncclCommAbort", communicator)

    def _meet(self, store: GroupStore | GroupStoreClient, rank: int, members: int) -> bytes:
        """NCCL's name of the group, once every member has come: it has no patience of its own."""
        version = self._nccl.version()
        if rank:
            store.set(f"member {rank}", b"")
            given = store.get("nccl")
        else:
            for other in range(1, members):
                store.get(f"member {other}")
            given = _VERSION.pack(version) + self._nccl.unique_id()
            store.set("nccl", given)
        (theirs,) = _VERSION.unpack_from(given)
        if theirs // 100 != version // 100:
            raise RuntimeError(
                f"NCCL is {_dotted(version)} here, and {_dotted(theirs)} in the trainer"
            )
        return given[_VERSION.size :]

    @contextmanager
    def _opened(self) -> Iterator[ctypes.c_void_p]:
        """The communicator, which is not aborted meanwhile. Raises RuntimeError: it has been."""
        with self._abort:
            if not self._communicator:
                raise RuntimeError("the group with the trainer is closed")
            yield self._communicator

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        """NCCL begins what is called within it together. This thread's group ends even if a call
        fails, or its later calls, to any communicator, would begin nothing.
        """
        self._nccl.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                self._nccl.call("ncclGroupEnd")
            raise
        self._nccl.call("ncclGroupEnd")

    def _wait_enqueued(self, until: float) -> None:
        """Return once what was begun on the communicator has been carried out, or enqueued."""
        spin_until = time.monotonic() + _SPIN_S
        while self._async_error() == _IN_PROGRESS:
            self._require_alive(until)
            time.sleep(0 if time.monotonic() < spin_until else _POLL_S)

    def _async_error(self) -> int:
        code = _INT()
        with self._opened() as communicator:
            self._nccl.call("ncclCommGetAsyncError", communicator, ctypes.byref(code))
        if code.value not in (_SUCCESS, _IN_PROGRESS):
            self.close()
            raise RuntimeError(f"NCCL: {self._nccl.reason(code.value)}")
        return code.value

    def _require_alive(self, until: float) -> None:
        self._async_error()
        if time.monotonic() > until:
            self.close()
            raise RuntimeError("not every member of the group has taken part in time")


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
