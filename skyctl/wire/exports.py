"""Memory of one process's GPU that another reads in place, by CUDA IPC, as plain data.

The fields are those of torch's own `reduce_tensor`, so every kind of allocation works that torch
can share, expandable segments included. They travel as JSON: nothing is unpickled. The other
process must be of the same user and see the same `/dev/shm`; which GPUs it sees does not matter.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Export:
    """A storage, seen as elements of one dtype. All bytes are in base64."""

    dtype: str
    """torch's name of the dtype."""
    device: str
    """The UUID of its GPU."""
    handle: str
    """Names the allocation that it is in."""
    size: int
    """Its bytes."""
    offset: int
    """Where it begins in the allocation, in bytes."""
    counter: str
    """torch's reference counter: the file, and the place in it."""
    counter_at: int
    """The place in that file."""
    event: str
    """What a reader waits for before its first read."""
    syncs: bool
    """Whether there is such an event."""

    def to_wire(self) -> list[Any]:
        return [*vars(self).values()]

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> Export:
        """Inverse of `to_wire`; a row of another form raises TypeError or ValueError."""
        dtype, device, handle, size, offset, counter, counter_at, event, syncs = row
        place = str(dtype), str(device), str(handle), int(size), int(offset)
        return cls(*place, str(counter), int(counter_at), str(event), bool(syncs))


class Exporter:
    """Exports what lies in this process's memory, each storage once as long as it lives.

    A storage that is freed while another process still maps it stays allocated until that process
    lets go of it.
    """

    def __init__(self) -> None:
        self._fields: dict[tuple[int, int], tuple[StorageWeakRef, tuple[Any, ...]]] = {}

    def export(self, tensors: Iterable[torch.Tensor]) -> tuple[list[Export], list[tuple[int, int]]]:
        """Exports that contain these tensors, and for each tensor the number of its export and its
        first element there.

        Raises:
            ValueError: a tensor is not on a GPU, or has gaps; the message names its position.
        """
        given = list(tensors)
        for position, tensor in enumerate(given):
            if problem := self._problem(tensor):
                raise ValueError(f"tensor {position} {problem}")
        firsts, places = places_of(given)
        self._fields = {k: v for k, v in self._fields.items() if not v[0].expired()}
        return [self._export(t.untyped_storage(), t.dtype) for t in firsts], places

    def _problem(self, tensor: torch.Tensor) -> str:
        """Why it cannot be exported; "" if it can."""
        if tensor.device.type != "cuda":
            return "is not on a GPU"
        return "" if tensor.is_contiguous() else "is not contiguous"

    def _export(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Export:
        key = (storage.data_ptr(), storage.nbytes())
        seen = self._fields.get(key)
        if seen is None or seen[0].expired() or seen[0].cdata != storage._cdata:
            # the memory at this address may be another allocation by now
            seen = self._fields[key] = (StorageWeakRef(storage), storage._share_cuda_())
        _, handle, size, offset, counter, counter_at, event, syncs = seen[1]
        device = str(torch.cuda.get_device_properties(storage.device).uuid)
        place = str(dtype).removeprefix("torch."), device, _text(handle), int(size), int(offset)
        return Export(*place, _text(counter), int(counter_at), _text(event), bool(syncs))


def places_of(
    tensors: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """A tensor of each storage that these lie in, and for each tensor the number of its storage and
    its first element there. A storage with elements of several dtypes counts for each.
    """
    numbers: dict[tuple[int, int, torch.dtype], int] = {}
    firsts: list[torch.Tensor] = []
    places = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes(), tensor.dtype)
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(tensor)
        places.append((numbers[key], tensor.storage_offset()))
    return firsts, places


def opened(export: Export, device: torch.device) -> torch.Tensor:
    """The elements of an export, as a flat tensor; not a copy. To this process they are memory of
    `device`, whichever GPU has them.

    Raises:
        RuntimeError: this process cannot map that memory; says why.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        *(index, _octets(export.handle), export.size, export.offset),
        *(_octets(export.counter), export.counter_at, _octets(export.event), export.syncs),
    )
    dtype = getattr(torch, export.dtype)
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(storage, 0, (export.size // dtype.itemsize,))


def _text(octets: bytes) -> str:
    return base64.b64encode(octets).decode()


def _octets(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
