"""CUDA IPC: servers copy each chunk out of the sender's buffers on their own GPUs.

Speaks to vLLM's native engine (`distributed/weight_transfer/ipc_engine.py`, packed), and to engines
that are told the place of each tensor. One sender serves every GPU of the host: a chunk is read
once, copied to the first GPU, and from there to the others over NVLink. All slots of a GPU are one
allocation, so that a server maps it once.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

from skyctl.engines.dialect import HANDLE_PROTOCOL, Dialect, Placement
from skyctl.transfer.gpu.carrier import DeviceCarrier, pickle_handles
from skyctl.transfer.gpu.devices import uuid_of
from skyctl.transfer.plan import ALIGNMENT, Chunk
from skyctl.transfer.reader import Filled
from skyctl.transfer.transports.base import Session, Transport, tensor_headers

_DEVICE = 6
"""Index of the GPU in the arguments of `rebuild_cuda_tensor`."""


class IpcTransport(Transport):
    """Servers read by themselves; nothing needs to act at the same time."""

    name = "ipc"
    resident = True
    ordered = False
    shares_gpus = True

    def __init__(self, *, places_tensors: bool = False) -> None:
        self._places_tensors = places_tensors
        self.alignment = ALIGNMENT if places_tensors else 1  # vLLM's packed format has no padding

    def speaking(self, dialect: Dialect) -> Transport:
        return IpcTransport(places_tensors=True) if dialect.places_tensors else self

    def sender_options(self, server_gpus: Sequence[Sequence[int]], **_: Any) -> dict[str, Any]:
        gpus = [list(gpus) for gpus in server_gpus]
        return {"server_gpus": gpus, "by_rank": self._places_tensors}

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        return dialect.ipc_init_info(packed=True)

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, server: int, dialect: Dialect
    ) -> dict[str, Any]:
        return dialect.ipc_update_info(
            tensor_headers(chunk),
            filled.extra["handles"][server],
            Placement(
                [placed.offset for placed in chunk.placed],
                [placed.tensor.nbytes for placed in chunk.placed],
            ),
        )


TRANSPORT = IpcTransport()


def open_carrier(session: str, options: dict[str, Any]) -> IpcCarrier:
    """The sender's half. Imports torch."""
    return IpcCarrier(options["server_gpus"], by_rank=options["by_rank"])


class IpcCarrier(DeviceCarrier):
    """Slots on every GPU that hosts a worker, exported to each server.

    A server's handles are one pickled mapping of GPUs (UUIDs) to rebuild arguments, as vLLM takes
    them; with `by_rank`, a list of pickled rebuild arguments, one for each of its GPUs.
    """

    def __init__(self, server_gpus: Sequence[Sequence[int]], *, by_rank: bool = False) -> None:
        self._by_rank = by_rank
        super().__init__(sorted({gpu for gpus in server_gpus for gpu in gpus}), server_gpus)
        self._uuids = {device: uuid_of(device) for device in self.devices}

    def extra(self, slot: int) -> dict[str, Any]:
        """Handles of a slot, one payload per server.

        torch counts one release per export, so each server gets an export of its own for each
        chunk; a shared one would be released twice and its memory never freed.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        if self.shown:
            return {}  # a slot that is exported and never mapped would not be freed either
        exported = [
            {self._uuids[gpu]: reduce_tensor(self.slots.view(gpu, slot))[1] for gpu in gpus}
            for gpus in self.server_gpus
        ]
        if self._by_rank:
            return {"handles": [[by_uuid(*gpu) for gpu in gpus.items()] for gpus in exported]}
        return {"handles": [pickle_handles(handles) for handles in exported]}

    def endpoint(self) -> dict[str, Any]:
        return {}

    def join(self) -> None:
        """A no-op: there is no group to form."""

    def send(self, slot: int, size: int) -> None:
        """A no-op: servers read by themselves."""


def by_uuid(uuid: str, arguments: tuple[Any, ...]) -> str:
    """Rebuild arguments that name the GPU by its UUID: the other process may number GPUs
    differently.
    """
    named = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return base64.b64encode(pickle.dumps(named, HANDLE_PROTOCOL)).decode("ascii")
