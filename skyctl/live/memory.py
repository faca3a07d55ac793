"""What one rank of a trainer offers out of its memory: exports of the storages that its tensors lie
in, or what it sends of them, and sums of what the servers get.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from skyctl.live.model import Pair
from skyctl.live.offer import GLOO, IPC
from skyctl.live.sending import Sender
from skyctl.live.sums import Summer
from skyctl.wire.exports import Exporter, places_of

if TYPE_CHECKING:
    from skyctl.wire.group_store import GroupStore

Body = dict[str, Any]


class Flats(Sequence[torch.Tensor]):
    """Each export as a flat tensor, made when it is looked at: most are read by their address, and
    thousands of tensors take longer than a sum. Keeps the storages alive.

    Raises:
        RuntimeError: one was freed.
    """

    def __init__(
        self, storages: Sequence[tuple[StorageWeakRef, torch.dtype, torch.device]]
    ) -> None:
        self._types = storages
        self._storages = [
            torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference, _, _ in storages
        ]
        if None in self._storages:
            raise RuntimeError("a tensor was freed while it was offered")

    @property
    def addresses(self) -> list[int]:
        """Where each begins."""
        return [storage.data_ptr() for storage in self._storages]

    def __len__(self) -> int:
        return len(self._storages)

    def __getitem__(self, number: Any) -> Any:
        storage, (_, dtype, device) = self._storages[number], self._types[number]
        empty = torch.empty(0, dtype=dtype, device=device)
        return empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))


class RankMemory:
    """One rank's end. Keeps no tensor alive between pushes.

    Args:
        transport: how servers get at the tensors (`live/offer.py`).
    """

    def __init__(self, transport: str = IPC) -> None:
        self._exporter = Exporter()
        self._transport = transport
        self._sender = Sender()
        self._described: Body | None = None
        self._storages: list[tuple[StorageWeakRef, torch.dtype, torch.device]] = []
        self._summers: dict[str, Summer] = {}
        self._addresses: list[int] = []
        self._names: dict[str, list[str]] = {}
        self.key = ""

    def describe(self, pairs: Sequence[Pair]) -> Body:
        """The exports that these tensors lie in, and the place of each: [export, first element].
        `same`: they are where they were. `reason`: why they cannot be copied from.
        """
        tensors = [local for _, local in pairs]
        try:
            exports, places = self._exported(tensors)
        except (ValueError, RuntimeError) as error:
            self.forget()
            return {"reason": str(error)}
        firsts = {export: tensor for tensor, (export, _) in zip(tensors, places, strict=True)}
        self._storages = [
            (StorageWeakRef(tensor.untyped_storage()), tensor.dtype, tensor.device)
            for _, tensor in sorted(firsts.items())
        ]
        described = {
            "exports": exports,
            "places": places,
            "pid": os.getpid(),
            "transport": self._transport,
            "storages": [
                (tensor.untyped_storage().data_ptr(), str(tensor.dtype))
                for tensor in firsts.values()
            ],
        }
        if described == self._described:
            return self.unchanged()
        self._described, self.key = described, ""
        return {**described, "key": "", "group": self._sender.group}

    def _exported(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[tuple[int, int]]]:
        """The exports as they travel, none where this rank sends; and the places. Raises
        ValueError.
        """
        devices = {str(tensor.device): None for tensor in tensors}
        if len(devices) > 1:  # they are summed, and sent, on one
            raise ValueError(f"its tensors are on {' and '.join(devices)}")
        if self._transport == IPC:
            exports, places = self._exporter.export(tensors)
            return [export.to_wire() for export in exports], places
        device = "cpu" if self._transport == GLOO else "cuda"
        for tensor in tensors:
            if tensor.device.type != device or not tensor.is_contiguous():
                where = f"is on {tensor.device}" if tensor.is_contiguous() else "is not contiguous"
                raise ValueError(f"a tensor {where}, and {self._transport} does not send it")
        return [], places_of(tensors)[1]

    def unchanged(self) -> Body:
        """What `describe` says if all is where it was."""
        if self._described is None:
            return {}
        return {"same": True, "key": self.key, "group": self._sender.group}

    @property
    def freed(self) -> bool:
        """Whether some of what was described is gone."""
        return any(reference.expired() for reference, _, _ in self._storages)

    def forget(self) -> None:
        """What was described did not arrive."""
        self._described, self.key, self._storages = None, "", []
        self._sender.leave_group()

    def prepare(self, key: str, sums: Sequence[Body]) -> None:
        """Get ready to sum the copies out of this rank, for each layout of the servers' workers."""
        flats = Flats(self._storages)
        self._addresses = flats.addresses
        self._summers = {
            layout["layout"]: Summer(layout["parameters"], layout["rows"], flats) for layout in sums
        }
        self._names = {
            layout["layout"]: [name for name, _, _ in layout["parameters"]] for layout in sums
        }
        if self._transport != IPC:
            self._sender.prepare(sums)
        self.key = key

    def send(self, rank: int, group: Body, store: GroupStore | None) -> None:
        """Begin to send the servers' workers what they lack, in a thread. `group` says where they
        meet, and which layout each has; `store` is that of rank 0.
        """
        self._sender.send(rank, group, Flats(self._storages), store)

    def sent(self, timeout_s: float) -> None:
        """Return once all is sent, or could not be: the group in which it was not is left."""
        with suppress(RuntimeError):
            self._sender.wait(timeout_s)

    def leave_group(self) -> None:
        """Leave the group; the next push forms another."""
        self._sender.leave_group()

    def sum(self) -> Body:
        """What this rank contributes to the numbers of each layout, and the first parameter in
        which it has NaN or infinity.
        """
        flats = Flats(self._storages)
        assert flats.addresses == self._addresses
        partials = {layout: summer.sum(flats) for layout, summer in self._summers.items()}
        broken = [
            self._names[layout][number]
            for layout, partial in partials.items()
            for number in partial.not_finite
        ]
        return {
            "partials": {layout: partial.to_wire() for layout, partial in partials.items()},
            "not_finite": next(iter(broken), ""),
        }
