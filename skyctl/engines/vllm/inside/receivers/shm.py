"""Receive through the sender's anonymous memory, opened as /proc/<pid>/fd/<n>.

Bytes are read with preadv straight into the tensors' own memory: nothing is mapped, so nothing
keeps the sender's memory alive, and a sender that dies midway cannot raise SIGBUS here.
"""

from __future__ import annotations

import fcntl
import math
import os
import stat
from pathlib import Path
from typing import Any

import torch

from skyctl.wire.messages import ChunkUpdate, ReceiverInit


class ShmReceiver:
    """Reads chunks out of one sender's slots, which could be opened when it was made.

    Endpoint: {"pid": …, "fds": [one per slot]}.
    """

    def __init__(self, init: ReceiverInit, rank: int) -> None:
        self._pid = int(init.endpoint["pid"])
        self._fds = [int(fd) for fd in init.endpoint["fds"]]
        self._session = init.session
        self._slot_bytes = init.slot_bytes
        for slot in range(len(self._fds)):
            os.close(self._open_slot(slot))

    def _open_slot(self, slot: int) -> int:
        """A read-only descriptor of a slot, after checking that it is this push's memory.

        Raises:
            RuntimeError: it is gone, or it is something else.
        """
        path = f"/proc/{self._pid}/fd/{self._fds[slot]}"
        try:
            # O_NONBLOCK: whatever a wrong path leads to, opening it must not block the engine
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise RuntimeError(
                f"the sender's memory {path} cannot be opened ({error.strerror}); sender and "
                "server must run as one user on one machine (and in one pid namespace)"
            ) from error
        try:
            self._check(descriptor, slot)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, descriptor: int, slot: int) -> None:
        status = os.fstat(descriptor)
        target = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        expected = f"/memfd:skyctl-{self._session}-{slot}"
        if target.removesuffix(" (deleted)") != expected or not stat.S_ISREG(status.st_mode):
            raise RuntimeError(f"slot {slot} is {target}, not this push's memory")
        if status.st_uid != os.geteuid():
            raise RuntimeError(f"slot {slot} belongs to user {status.st_uid}, not to ours")
        if status.st_size != self._slot_bytes:
            raise RuntimeError(f"slot {slot} has {status.st_size} bytes, not {self._slot_bytes}")
        sealed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & sealed != sealed:
            raise RuntimeError(f"slot {slot} is not sealed against a change of size")

    def receive(self, update: ChunkUpdate) -> list[tuple[str, torch.Tensor]]:
        """The chunk's tensors, each in fresh memory."""
        if not 0 <= update.slot < len(self._fds):
            raise RuntimeError(f"there is no slot {update.slot}")
        descriptor = self._open_slot(update.slot)
        try:
            return [
                (name, _read(descriptor, getattr(torch, dtype), shape, offset))
                for name, dtype, shape, offset in zip(
                    update.names, update.dtype_names, update.shapes, update.offsets, strict=True
                )
            ]
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """A no-op: nothing is held between chunks."""


def _read(descriptor: int, dtype: Any, shape: list[int], offset: int) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        view = memoryview(memory.numpy())
        done = 0
        while done < nbytes:  # one call moves at most 2 GiB
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise RuntimeError(f"the sender's memory ends at {offset + done}")
            done += count
    return memory.view(dtype).reshape(shape)


RECEIVER = ShmReceiver
