"""What a rank of a trainer sends a worker, in steps: both cut the same copies in the same way.

In a step small copies are packed into a buffer, and long runs travel as they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from skyctl.wire.copies import copy_runs, cut_copy, octets_of
from skyctl.wire.layouts import Copy

STEP_BYTES = 128 << 20
"""What one worker gets in a step, from all ranks that send to it: a step of a rank ends once it has
its share of this, and takes up to twice that."""
_LONG_BYTES = 1 << 20
_ALIGNMENT = 16
_CUT_BYTES = 64


@dataclass
class Batch:
    """What one rank sends one worker in one step."""

    packed: list[tuple[Copy, int]] = field(default_factory=list)
    """Copies, each with its place in the buffer."""
    packed_bytes: int = 0
    """The size of that buffer."""
    long: list[Copy] = field(default_factory=list)
    """Single runs that are messages of their own."""
    nbytes: int = 0
    """All of it."""

    def add(self, copy: Copy) -> None:
        size = copy.rows * copy.row
        self.nbytes += size
        if copy.rows == 1 and size >= _LONG_BYTES:
            self.long.append(copy)
            return
        self.packed.append((copy, self.packed_bytes))
        self.packed_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def sent(
        self, exports: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        """The messages, as flat bytes, out of the exports that the copies' chunks number; cast to
        the dtypes of the parameters.
        """
        messages = []
        if self.packed:
            buffer = _octets(self.packed_bytes, exports[self.packed[0][0].chunk].device)
            for copy, place in self.packed:
                _copy_dense(copy, exports, dtypes, buffer, place)
            messages.append(buffer)
        for copy in self.long:
            export = exports[copy.chunk]
            if export.dtype == dtypes[copy.parameter]:
                messages.append(octets_of(export)[copy.source : copy.source + copy.row])
                continue
            buffer = _octets(copy.row, export.device)
            _copy_dense(copy, exports, dtypes, buffer, 0)
            messages.append(buffer)
        return messages

    def landing(
        self, buffer: torch.Tensor, targets: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Where the messages arrive: packed ones in a buffer of their size, and long runs in the
        parameters, flat bytes by their number.
        """
        places = [targets[c.parameter][c.target : c.target + c.row] for c in self.long]
        return [buffer, *places] if self.packed else places

    def unpack(self, arrived: Sequence[torch.Tensor], targets: Mapping[int, torch.Tensor]) -> None:
        """Copy what has arrived in the buffer into the parameters."""
        for copy, place in self.packed:
            dense = replace(copy, source=place, source_pitch=copy.row)
            copy_runs([dense], arrived[0], targets)


def batches(copies: Iterable[Copy], senders: int, step_bytes: int = STEP_BYTES) -> Iterator[Batch]:
    """The copies of one rank into one worker, in the steps in which they travel. `senders`: the
    ranks that send to this worker.
    """
    # a run is cut at multiples of this, never inside an element, which could not be cast
    step_bytes = max(step_bytes // senders // _CUT_BYTES, 1) * _CUT_BYTES
    batch = Batch()
    for whole in copies:
        for copy in cut_copy(whole, step_bytes):
            batch.add(copy)
            if batch.nbytes >= step_bytes:
                yield batch
                batch = Batch()
    if batch.nbytes:
        yield batch


def _octets(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _copy_dense(
    copy: Copy,
    exports: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    buffer: torch.Tensor,
    place: int,
) -> None:
    dense = replace(copy, target=place, target_pitch=copy.row)
    copy_runs([dense], exports[copy.chunk], {copy.parameter: buffer}, dtypes)
