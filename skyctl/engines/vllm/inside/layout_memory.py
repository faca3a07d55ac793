"""Memory that a worker copies parameters out of: the sender's, and its own beside the model."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from skyctl.wire.exports import Export

Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source of a copy."""

_ALIGNMENT = 256
SPARE_BYTES = 1 << 30
"""What staging leaves free on a GPU that it may take memory of without being told to."""


def suits_staging(
    parameters: Mapping[int, torch.Tensor], exports: Sequence[Sequence[Any]], device: torch.device
) -> bool:
    """Whether a trainer's weights are better copied beside these parameters first: it is on another
    GPU, and there is room.
    """
    size = sum(octets.numel() for octets in parameters.values())
    away = any(_on_another(exports, device))
    return away and torch.cuda.mem_get_info(device)[0] >= size + SPARE_BYTES


class PreparedCopies:
    """Copies that are made again and again, from where a trainer's weights lie to where they are
    copied. Keeps the tensors alive.

    One kernel makes those from another GPU: between two of its copies the copy engine leaves the
    link idle.

    Args:
        pairs: by the number of the export that they are copied out of.
    """

    def __init__(
        self,
        pairs: Mapping[int, Sequence[Pair]],
        exports: Sequence[Sequence[Any]],
        device: torch.device,
    ) -> None:
        self._pairs = pairs
        self._table: torch.Tensor | None = None
        self._others: list[Pair] = []
        away = _on_another(exports, device)
        if not any(away) or find_spec("triton") is None:
            self._others += chain.from_iterable(pairs.values())
            return
        from skyctl.wire.triton_copies import copy_pieces, in_words, pieces_of

        linked: list[Pair] = []
        for number, group in pairs.items():
            for pair in group:
                (linked if away[number] and in_words(*pair) else self._others).append(pair)
        self._table = pieces_of(linked).to(device)
        copy_pieces(self._table[:0])  # compiled before a freeze

    def enqueue(self) -> None:
        """Enqueue them all on the current stream."""
        if self._table is not None:
            from skyctl.wire.triton_copies import copy_pieces

            copy_pieces(self._table)
        copy_pairs(self._others)


class Beside:
    """Memory of the sizes of these parameters, where a push arrives while the model serves. Padding
    is zero, as theirs is.

    Raises:
        RuntimeError: there is not so much on the device.
    """

    def __init__(self, parameters: Mapping[int, torch.Tensor], device: torch.device) -> None:
        places, total = {}, 0
        for number, octets in parameters.items():
            places[number] = total
            total += -(-octets.numel() // _ALIGNMENT) * _ALIGNMENT
        if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < total:
            raise RuntimeError(
                f"{total >> 20} MiB are staged beside the model, and {free >> 20} MiB are free"
            )
        memory = torch.zeros(total, dtype=torch.uint8, device=device)
        self.parameters = {
            number: memory[at : at + parameters[number].numel()] for number, at in places.items()
        }
        self._pairs = [(parameters[number], self.parameters[number]) for number in parameters]
        self._device = device
        self._arrived: Any = None

    def fill(self, copies: PreparedCopies) -> None:
        """Begin to copy into it, on a stream of its own."""
        if self._device.type != "cuda":
            copies.enqueue()
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._arrived is not None:  # of a push that was given up
            stream.wait_event(self._arrived)
        with torch.cuda.stream(stream):
            copies.enqueue()
            self._arrived = stream.record_event()

    @property
    def is_filled(self) -> bool:
        """Whether all that `fill` copies is there."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> None:
        """Return once nothing is copied into it any more: then its memory may be freed, and that of
        the sources.
        """
        if self._arrived is not None:
            self._arrived.synchronize()

    def move(self) -> None:
        """Enqueue copies of all that arrives in it into the parameters."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        copy_pairs(self._pairs)


def _on_another(exports: Sequence[Sequence[Any]], device: torch.device) -> list[bool]:
    """Which of these exports lie on another GPU than this one."""
    if device.type != "cuda":
        return [False] * len(exports)
    own = str(torch.cuda.get_device_properties(device).uuid)
    return [Export.from_wire(row).device != own for row in exports]


def require_free(size: int, device: torch.device) -> None:
    """Raise RuntimeError if there is not so much memory for a push."""
    if device.type != "cuda":
        return
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached
    if free < size:
        raise RuntimeError(
            f"a push takes {size >> 20} MiB of GPU memory beside the model, and {free >> 20} MiB "
            "are free"
        )


def copy_pairs(pairs: Iterable[Pair]) -> None:
    """Enqueue copies: destination, source."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def sender_slots(payload: str, device: torch.device) -> torch.Tensor:
    """The sender's slots in this GPU's memory, as flat bytes; not a copy."""
    from vllm import envs

    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise RuntimeError("IPC handles need VLLM_ALLOW_INSECURE_SERIALIZATION=1")
    index = device.index
    handles = pickle.loads(base64.b64decode(payload))
    arguments = list(handles[str(torch.cuda.get_device_properties(index).uuid)])
    arguments[6] = index  # the device number in this process
    mapped: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return mapped
