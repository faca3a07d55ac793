"""Broadcast over loopback TCP with torch's gloo: the twin of NCCL.

The sender is rank 0; each server's workers take consecutive ranks. The group is the push's own:
torch's global process group is not used on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from skyctl.engines.base import Dialect
from skyctl.transfer.plan import ALIGNMENT, Chunk, Packing
from skyctl.transfer.reader import ChunkReader, Piece, ShardFiles
from skyctl.transfer.transports.base import Filled, Session, chunk_update, receiver_init
from skyctl.transfer.transports.rendezvous import HOST, Rendezvous


class GlooTransport:
    """Every worker of every server takes part in each broadcast."""

    name = "gloo"
    collective = True
    resident = False
    one_update = False
    ordered = True
    shares_gpus = False
    leaves_group = False
    packing: Packing = "fit"
    alignment = ALIGNMENT

    def sender_options(
        self,
        *,
        world_size: int,
        rendezvous_timeout_s: float,
        update_timeout_s: float,
        **_: Any,
    ) -> dict[str, Any]:
        return {
            "world_size": world_size,
            "rendezvous_timeout_s": rendezvous_timeout_s,
            "update_timeout_s": update_timeout_s,
        }

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        return receiver_init(self.name, session, {**session.endpoint, "rank_offset": rank_offset})

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, server: int, dialect: Dialect
    ) -> dict[str, Any]:
        return chunk_update(chunk, filled)


TRANSPORT = GlooTransport()


def open_carrier(session: str, options: dict[str, Any]) -> GlooCarrier:
    """The sender's half. Imports torch."""
    return GlooCarrier(session, options)


class GlooCarrier:
    """Rank 0 of the group, and the store where ranks find each other."""

    staged_whole = False

    def __init__(self, session: str, options: dict[str, Any]) -> None:
        import torch.distributed as dist

        self._session = session
        self._world_size = int(options["world_size"])
        self._rendezvous_s = float(options["rendezvous_timeout_s"])
        self._update_s = float(options["update_timeout_s"])
        # given a listening socket, the store stays on loopback; left alone it binds every address
        self._rendezvous = Rendezvous(self._world_size)
        self._store = dist.TCPStore(
            HOST,
            self._rendezvous.port,
            self._world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._rendezvous_s),
            master_listen_fd=self._rendezvous.socket.detach(),
        )
        self._group: Any = None
        self._slots: list[Any] = []

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
        import torch

        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(slots)]
        views = [memoryview(slot.numpy()) for slot in self._slots]
        return ChunkReader(files, chunks, views, threads=threads)

    def extra(self, slot: int) -> dict[str, Any]:
        return {}

    def endpoint(self) -> dict[str, Any]:
        return {
            "host": HOST,
            "port": self._rendezvous.port,
            "world_size": self._world_size,
            "rendezvous_timeout_s": self._rendezvous_s,
            "update_timeout_s": self._update_s,
        }

    def join(self) -> None:
        import torch.distributed as dist

        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=self._rendezvous_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(self._session, self._store), 0, self._world_size, options
        )
        self._rendezvous.close(self._store)

    def send(self, slot: int, size: int) -> None:
        self._group.broadcast(self._slots[slot][:size], 0).wait(timedelta(seconds=self._update_s))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()
        self._slots.clear()
