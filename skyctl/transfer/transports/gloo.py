"""Broadcast over loopback TCP with torch's gloo: the twin of NCCL.

The sender is rank 0; each server's workers take consecutive ranks. The group is the push's own:
torch's global process group is not used on either side.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from skyctl.transfer.transports.base import CpuCarrier, Transport
from skyctl.transfer.transports.rendezvous import HOST, Rendezvous


class GlooTransport(Transport):
    """Every worker of every server takes part in each broadcast."""

    name = "gloo"
    collective = True

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


TRANSPORT = GlooTransport()


def open_carrier(session: str, options: dict[str, Any]) -> GlooCarrier:
    """The sender's half. Imports torch."""
    return GlooCarrier(session, options)


class GlooCarrier(CpuCarrier):
    """Rank 0 of the group, and the store where ranks find each other."""

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

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        import torch

        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(slots)]
        return [memoryview(slot.numpy()) for slot in self._slots]

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
