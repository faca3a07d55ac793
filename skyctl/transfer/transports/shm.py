"""Anonymous shared memory (memfd) that servers on this machine open through /proc: the CPU twin of
CUDA IPC.

The memory has no name in the file system: it disappears with the sender, however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

from skyctl.transfer.carrier import CpuCarrier
from skyctl.transfer.transports.base import Transport


class ShmTransport(Transport):
    """Servers copy each chunk out of the sender's slots; nothing needs to act at the same time."""

    name = "shm"


TRANSPORT = ShmTransport()


def open_carrier(session: str, options: dict[str, Any]) -> ShmCarrier:
    """The sender's half."""
    return ShmCarrier(session)


class ShmCarrier(CpuCarrier):
    """Slots in memory files that only this process holds."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._descriptors: list[int] = []
        self._maps: list[mmap.mmap] = []

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        for slot in range(slots):
            descriptor = os.memfd_create(
                f"skyctl-{self._session}-{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, slot_bytes)
            # receivers rely on the size: it can never change under their reads
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._maps.append(mmap.mmap(descriptor, slot_bytes))
        return [memoryview(slot) for slot in self._maps]

    def endpoint(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "fds": list(self._descriptors)}

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._maps.clear()
