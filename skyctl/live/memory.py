"""What one rank of a trainer offers out of its GPU: exports of the storages that its tensors lie
in, and sums of what the servers copy out of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from skyctl.live.model import Pair
from skyctl.live.sums import Summer
from skyctl.wire.exports import Exporter

Body = dict[str, Any]


class RankMemory:
    """One rank's end. Keeps no tensor alive between pushes."""

    def __init__(self) -> None:
        self._exporter = Exporter()
        self._described: Body | None = None
        self._storages: list[tuple[StorageWeakRef, torch.dtype, torch.device]] = []
        self._summers: dict[str, Summer] = {}
        self._names: dict[str, list[str]] = {}
        self.key = ""

    def describe(self, pairs: Sequence[Pair]) -> Body:
        """The exports that these tensors lie in, and the place of each: [export, first element].
        `same`: they are where they were. `reason`: why they cannot be copied from.
        """
        tensors = [local for _, local in pairs]
        try:
            exports, places = self._exporter.export(tensors)
        except (ValueError, RuntimeError) as error:
            self.forget()
            return {"reason": str(error)}
        described = {
            "exports": [export.to_wire() for export in exports],
            "places": places,
            "pid": os.getpid(),
        }
        if described == self._described:
            return self.unchanged()
        self._described, self.key = described, ""
        firsts = {export: tensor for tensor, (export, _) in zip(tensors, places, strict=True)}
        self._storages = [
            (StorageWeakRef(tensor.untyped_storage()), tensor.dtype, tensor.device)
            for _, tensor in sorted(firsts.items())
        ]
        return {**described, "key": ""}

    def unchanged(self) -> Body:
        """What `describe` says if all is where it was."""
        return {"same": True, "key": self.key} if self._described is not None else {}

    def forget(self) -> None:
        """What was described did not arrive."""
        self._described, self.key, self._storages = None, "", []

    def prepare(self, key: str, sums: Sequence[Body]) -> None:
        """Get ready to sum the copies out of this rank, for each layout of the servers' workers."""
        flats = self._flats()
        self._summers = {
            layout["layout"]: Summer(layout["parameters"], layout["rows"], flats) for layout in sums
        }
        self._names = {
            layout["layout"]: [name for name, _, _ in layout["parameters"]] for layout in sums
        }
        self.key = key

    def sum(self) -> Body:
        """What this rank contributes to the numbers of each layout, and the first parameter in
        which it has NaN or infinity.
        """
        flats = self._flats()
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

    def _flats(self) -> list[torch.Tensor]:
        """Each export as a flat tensor. Raises RuntimeError if it was freed."""
        flats = []
        for reference, dtype, device in self._storages:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                raise RuntimeError("a tensor was freed while it was offered")
            empty = torch.empty(0, dtype=dtype, device=device)
            flats.append(empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,)))
        return flats
