"""Broadcast over TCP with torch's gloo: the twin of NCCL.

The sender is rank 0; each server's workers take consecutive ranks. The group is the push's own, and
so is its secret, which servers are told in their init call.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from skyctl.transfer.carrier import CpuCarrier
from skyctl.transfer.transports.base import Transport
from skyctl.wire.group_store import GroupStore
from skyctl.wire.proofs import SECRET_BYTES


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
        address: str,
        **_: Any,
    ) -> dict[str, Any]:
        return {
            "address": address,
            "world_size": world_size,
            "rendezvous_timeout_s": rendezvous_timeout_s,
            "update_timeout_s": update_timeout_s,
        }


TRANSPORT = GlooTransport()


def open_carrier(session: str, options: dict[str, Any]) -> GlooCarrier:
    """The sender's half. Imports torch."""
    return GlooCarrier(options)


class GlooCarrier(CpuCarrier):
    """Rank 0 of the group, and the store where ranks find each other."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._address = str(options["address"])
        self._world_size = int(options["world_size"])
        self._rendezvous_s = float(options["rendezvous_timeout_s"])
        self._update_s = float(options["update_timeout_s"])
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._store = GroupStore(
            self._address,
            self._secret,
            ranks=self._world_size - 1,
            timeout_s=self._rendezvous_s,
        )
        self._group: Any = None
        self._slots: list[Any] = []

    def allocate(self, slots: int, slot_bytes: int) -> list[memoryview]:
        import torch

        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(slots)]
        return [memoryview(slot.numpy()) for slot in self._slots]

    def endpoint(self) -> dict[str, Any]:
        return {
            "host": self._address,
            "port": self._store.port,
            "secret": self._secret.hex(),
            "world_size": self._world_size,
            "rendezvous_timeout_s": self._rendezvous_s,
            "update_timeout_s": self._update_s,
        }

    def join(self) -> None:
        from skyctl.wire.gloo_group import form_group

        try:
            self._group = form_group(
                self._store,
                self._secret,
                address=self._address,
                rank=0,
                world_size=self._world_size,
                timeout_s=self._rendezvous_s,
            )
        finally:
            self._store.close()

    def send(self, slot: int, size: int) -> None:
        self._group.broadcast(self._slots[slot][:size], 0).wait(timedelta(seconds=self._update_s))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()
        self._store.close()
        self._slots.clear()
