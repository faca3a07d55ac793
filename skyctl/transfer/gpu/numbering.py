"""What servers must hold after a push: a number per parameter, from the bytes that were read.

A parameter whose bytes are in a chunk exactly as they will be in a worker is numbered there; others
are first built from the sender's own chunks, as the worker's program says. A worker that holds the
same numbers (`wire/device_digest.py`) holds the checkpoint, every byte of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

from skyctl.transfer.reader import BATCH_BYTES
from skyctl.wire.layouts import Copy, Program


class Numbering:
    """Numbers of the parameters of several programs. Chunks are added once each, in any order.

    Extra memory on the GPU, if parameters must be built: a batch of them, at least the largest one,
    and those not yet complete (`push/worker_memory.py`, `numbering_bytes`). It is allocated up
    front: allocating beside copies from the host holds these up.
    """

    def __init__(self, programs: Sequence[Program], device: int | str) -> None:
        self._device = device
        self._programs = [_Unfinished(program) for program in programs]
        if largest := max((program.largest_built for program in self._programs), default=0):
            import torch

            # freed at once to torch's cache, which serves the allocations that follow
            sizes = (largest, max(largest, BATCH_BYTES))
            _ = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

    def add(self, chunk: int, octets: Any) -> list[dict[str, int]]:
        """Numbers of the parameters that this chunk completes, per program. Returns once the chunk
        is no longer needed.

        Args:
            chunk: its number in the plan.
            octets: its bytes, a flat uint8 tensor on the GPU.
        """
        return [self._add(program, chunk, octets) for program in self._programs]

    def _add(self, program: _Unfinished, chunk: int, octets: Any) -> dict[str, int]:
        from skyctl.wire.copies import copy_runs

        numbers: dict[str, int] = {}
        arrived: dict[str, Any] = {}
        batch: dict[str, Any] = {}
        for parameter, copies in program.copies_of(chunk):
            if program.lies_whole(parameter):
                begin = copies[0].source
                arrived[program.name(parameter)] = octets[begin : begin + copies[0].row]
                continue
            built = program.built(parameter, self._device)
            copy_runs(copies, octets, {parameter: built})
            if program.complete(parameter, copies):
                batch[program.name(parameter)] = built
                if sum(tensor.numel() for tensor in batch.values()) >= BATCH_BYTES:
                    numbers |= _numbered(batch)
        return numbers | _numbered(batch) | _numbered(arrived)


class _Unfinished:
    """One program as its chunks arrive."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._copies: dict[int, dict[int, list[Copy]]] = {}
        self._remaining: Counter[int] = Counter()
        self._building: dict[int, Any] = {}
        for copy in program.copies:
            of_chunk = self._copies.setdefault(copy.chunk, {})
            of_chunk.setdefault(copy.parameter, []).append(copy)
            self._remaining[copy.parameter] += copy.rows * copy.row
        sizes = list(map(_bytes_of, program.parameters))
        self._whole = {
            copy.parameter
            for copy in program.copies
            if copy.rows == 1 and copy.row == sizes[copy.parameter]
        }
        built = (size for place, size in enumerate(sizes) if place not in self._whole)
        self.largest_built = max(built, default=0)

    def lies_whole(self, parameter: int) -> bool:
        """Whether the parameter is a single run of one chunk."""
        return parameter in self._whole

    def name(self, parameter: int) -> str:
        return self._program.parameters[parameter][0]

    def copies_of(self, chunk: int) -> list[tuple[int, list[Copy]]]:
        return list(self._copies.get(chunk, {}).items())

    def built(self, parameter: int, device: int | str) -> Any:
        """The parameter's bytes so far; padding and missing bytes are zero."""
        import torch

        if parameter not in self._building:
            size = _bytes_of(self._program.parameters[parameter])
            self._building[parameter] = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._building[parameter]

    def complete(self, parameter: int, copies: Sequence[Copy]) -> bool:
        """Count what was copied; a complete parameter is dropped from the unfinished ones."""
        self._remaining[parameter] -= sum(copy.rows * copy.row for copy in copies)
        if self._remaining[parameter]:
            return False
        del self._building[parameter]
        return True


def _bytes_of(parameter: tuple[str, str, tuple[int, ...]]) -> int:
    import torch

    _, dtype, shape = parameter
    return prod(shape) * int(getattr(torch, dtype).itemsize)


def _numbered(batch: dict[str, Any]) -> dict[str, int]:
    """Numbers of the tensors in the batch, which is empty afterwards."""
    from skyctl.wire.device_digest import digest_on_device

    numbers = dict(zip(batch, digest_on_device(list(batch.values())), strict=True))
    batch.clear()
    return numbers
