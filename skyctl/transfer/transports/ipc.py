"""CUDA IPC: servers copy each chunk out of the sender's buffers on their own GPUs.

Speaks to vLLM's native engine (`distributed/weight_transfer/ipc_engine.py`, packed). One sender
serves every GPU of the host: a chunk is read once, copied to the first GPU, and from there to the
others over NVLink. All slots of a GPU are one allocation, so that a server maps it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyctl.engines.base import Dialect
from skyctl.transfer.gpu.carrier import GpuCarrier, pickle_handles
from skyctl.transfer.gpu.devices import uuid_of
from skyctl.transfer.plan import Chunk
from skyctl.transfer.reader import Filled
from skyctl.transfer.transports.base import Session, Transport, tensor_headers


class IpcTransport(Transport):
    """Servers read by themselves; nothing needs to act at the same time."""

    name = "ipc"
    resident = True
    ordered = False
    shares_gpus = True
    alignment = 1  # vLLM's packed format has no padding

    def sender_options(self, server_gpus: Sequence[Sequence[int]], **_: Any) -> dict[str, Any]:
        return {"server_gpus": [list(gpus) for gpus in server_gpus]}

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        return dialect.ipc_init_info(packed=True)

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, server: int, dialect: Dialect
    ) -> dict[str, Any]:
        return dialect.ipc_update_info(
            tensor_headers(chunk),
            filled.extra["handles"][server],
            sizes_bytes=[placed.tensor.nbytes for placed in chunk.placed],
        )


TRANSPORT = IpcTransport()


def open_carrier(session: str, options: dict[str, Any]) -> IpcCarrier:
    """The sender's half. Imports torch."""
    return IpcCarrier(options["server_gpus"])


class IpcCarrier(GpuCarrier):
    """Slots on every GPU that hosts a worker, exported to each server."""

    def __init__(self, server_gpus: Sequence[Sequence[int]]) -> None:
        super().__init__(sorted({gpu for gpus in server_gpus for gpu in gpus}), server_gpus)
        self._uuids = {device: uuid_of(device) for device in self.devices}

    def extra(self, slot: int) -> dict[str, Any]:
        """Handles of a slot, one payload per server.

        torch counts one release per export, so each server gets an export of its own, anew for
        each chunk; a shared one would be released twice and its memory never come back.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        if self.shown:
            return {}  # what is exported and never mapped would not be freed either
        handles = []
        for gpus in self.server_gpus:
            payload = {
                self._uuids[gpu]: reduce_tensor(self.slots.view(gpu, slot))[1] for gpu in gpus
            }
            handles.append(pickle_handles(payload))
        return {"handles": handles}

    def endpoint(self) -> dict[str, Any]:
        return {}

    def join(self) -> None:
        """No group to form."""

    def send(self, slot: int, size: int) -> None:
        """Servers read by themselves."""
