"""Anonymous shared memory (memfd) that servers on this machine open through /proc: twin of IPC.

The memory has no name in the file system: it is gone when the sender is, however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any

from skyctl.engines.base import Dialect
from skyctl.transfer.plan import ALIGNMENT, Chunk, Packing
from skyctl.transfer.reader import ChunkReader, Piece, ShardFiles
from skyctl.transfer.transports.base import Filled, Session, chunk_update, receiver_init


class ShmTransport:
    """Servers copy each chunk out of the sender's slots; nothing needs to act at the same time."""

    name = "shm"
    collective = False
    resident = False
    one_update = False
    ordered = True
    shares_gpus = False
    leaves_group = False
    packing: Packing = "fit"
    alignment = ALIGNMENT

    def sender_options(self, **_: Any) -> dict[str, Any]:
        return {}

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        return receiver_init(self.name, session, dict(session.endpoint))

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, server: int, dialect: Dialect
    ) -> dict[str, Any]:
        return chunk_update(chunk, filled)


TRANSPORT = ShmTransport()


def open_carrier(session: str, options: dict[str, Any]) -> ShmCarrier:
    """The sender's half."""
    return ShmCarrier(session)


class ShmCarrier:
    """Slots in memory files that only this process holds."""

    staged_whole = False

    def __init__(self, session: str) -> None:
        self._session = session
        self._descriptors: list[int] = []
        self._maps: list[mmap.mmap] = []

    def open_reader(
        self,
        files: ShardFiles,
        chunks: Sequence[Sequence[Piece]],
        *,
        slots: int,
        slot_bytes: int,
        threads: int,
        ring_only: bool = False,
        reserve_bytes: int = 0,
    ) -> ChunkReader:
        return ChunkReader(files, chunks, self.allocate(slots, slot_bytes), threads=threads)

    def extra(self, slot: int) -> dict[str, Any]:
        return {}

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        """Writable memory of every slot."""
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

    def join(self) -> None:
        """No group to form."""

    def send(self, slot: int, size: int) -> None:
        """Servers read by themselves."""

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._maps.clear()
