"""What servers must hold after a live push: a number per parameter, to which each rank of the
trainer contributes what it has.

A number is a sum over the words of a parameter (`wire/device_digest.py`), so each rank sums the
words that the plan copies out of it, as they will lie in the servers, and rank 0 adds. Words of
which several ranks have bytes travel as they are. NaN and infinity are looked for on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from skyctl.live.plan import Row
from skyctl.wire.copies import cut_copy, paired_runs
from skyctl.wire.device_digest import sum_of_words
from skyctl.wire.finite import EXPONENTS, each_finite
from skyctl.wire.layouts import Copy

_WORD = 8
_RUN_WORDS = 1 << 17
"""Words of one entry of the kernel's table, at most."""
_BATCH_BYTES = 128 << 20
"""What must be cast, or moved to where words begin, is summed in parts of at most twice this size,
all in the same spare memory.
"""
_IMAGE_BYTES = 64 << 20
"""The same for what is not whole words."""

Parameters = Sequence[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each parameter of a layout."""


@dataclass
class Partial:
    """What one rank contributes to the numbers of one layout, by the number of the parameter."""

    sums: dict[int, int] = field(default_factory=dict)
    """Of its whole words."""
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    """Parameter, word, and the bytes of that word that the rank has, as a number."""
    not_finite: list[int] = field(default_factory=list)
    """Parameters of which it has NaN or infinity."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Partial:
        """Inverse of `to_wire`, also after JSON."""
        return cls(
            {int(parameter): int(value) for parameter, value in data["sums"].items()},
            [(int(parameter), int(word), int(value)) for parameter, word, value in data["edges"]],
            [int(parameter) for parameter in data["not_finite"]],
        )


def added(parameters: Parameters, partials: Iterable[Partial]) -> dict[str, int]:
    """The numbers of all parameters, by name, from what each rank contributes."""
    totals = [0] * len(parameters)
    edges: dict[tuple[int, int], int] = {}
    for partial in partials:
        for parameter, value in partial.sums.items():
            totals[parameter] += value
        for parameter, word, value in partial.edges:  # no two ranks have the same byte
            edges[parameter, word] = edges.get((parameter, word), 0) + value
    words = torch.tensor([_signed(value) for value in edges.values()], dtype=torch.int64)
    places = torch.tensor([word for _, word in edges], dtype=torch.int64)
    for (parameter, _), value in zip(edges, sum_of_words(words, places).tolist(), strict=True):
        totals[parameter] += value
    return {name: _signed(total) for (name, _, _), total in zip(parameters, totals, strict=True)}


def _signed(value: int) -> int:
    """A number modulo 2^64, as torch has it."""
    return (value + 2**63) % 2**64 - 2**63


class Summer:
    """Sums what one rank has of the parameters of one layout, again and again where it lies. Keeps
    no tensor alive.

    Whole words of the right dtype are summed in place by one kernel. What must be cast, or begins
    within a word of the source, is first copied to spare memory, part by part. What is not whole
    words in the parameter is taken apart by torch, as is everything on a CPU.

    Args:
        rows: the copies out of this rank (`WorkerPlan.rows_by_rank`); their chunks are numbers of
            `exports`.
        exports: flat tensors, all on one device.
        by_kernel: whether the kernel is used; None: on GPUs.
    """

    def __init__(
        self,
        parameters: Parameters,
        rows: Sequence[Row],
        exports: Sequence[torch.Tensor],
        *,
        by_kernel: bool | None = None,
    ) -> None:
        self._sources = [export.dtype for export in exports]
        self._exports: Sequence[torch.Tensor] = ()
        self._count = len(parameters)
        self._dtypes = [getattr(torch, dtype) for _, dtype, _ in parameters]
        self._exponents = [EXPONENTS.get(dtype, 0) for dtype in self._dtypes]
        self._device = exports[0].device if exports else torch.device("cpu")
        self._by_kernel = self._device.type == "cuda" if by_kernel is None else by_kernel
        in_place: list[tuple[Copy, int, int]] = []
        moved: list[Copy] = []
        self._odd: list[Copy] = []
        for copy in self._by_words(rows):
            address = exports[copy.chunk].data_ptr() + copy.source
            if not self._in_words(copy):
                self._odd.append(copy)
            elif self._same_dtype(copy) and not (address | copy.source_pitch) % _WORD:
                in_place.append((copy, address, copy.source_pitch))
            else:
                moved.append(copy)
        self._table = self._entries(in_place)
        self._batches = list(self._batched(moved))

    def sum(self, exports: Sequence[torch.Tensor]) -> Partial:
        """What the exports, which must be where they were, hold now. Returns once the device has
        read everything.
        """
        self._exports = exports
        try:
            return self._sum()
        finally:
            self._exports = ()

    def _sum(self) -> Partial:
        both = torch.zeros((2, self._count), dtype=torch.int64, device=self._device)
        sums, broken = both
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the trainer's other streams may still write
        if self._by_kernel:
            self._sum_words(sums, broken)
        edges: list[tuple[int, int, int]] = []
        for copy in self._odd:
            edges += self._sum_odd(copy, sums, broken)
        totals, infinite = both.tolist()
        return Partial(
            {number: total for number, total in enumerate(totals) if total},
            edges,
            [number for number, wrong in enumerate(infinite) if wrong],
        )

    def _same_dtype(self, copy: Copy) -> bool:
        return bool(self._sources[copy.chunk] == self._dtypes[copy.parameter])

    def _in_words(self, copy: Copy) -> bool:
        """Whether it is whole words of the parameter, for the kernel."""
        pitch = copy.target_pitch if copy.rows > 1 else 0
        return self._by_kernel and not (copy.target | copy.row | pitch) % _WORD

    def _by_words(self, rows: Sequence[Row]) -> Iterator[Copy]:
        """The copies; single runs are cut where whole words begin and end in the parameter."""
        for copy in (Copy(*row) for row in rows):
            head = -copy.target % _WORD
            body = (copy.row - head) // _WORD * _WORD
            if copy.rows > 1 or body <= 0:
                yield copy
                continue
            for begin, size in ((0, head), (head, body), (head + body, copy.row - head - body)):
                if size:
                    source, target = copy.source + begin, copy.target + begin
                    yield replace(
                        copy, row=size, source=source, target=target, source_pitch=0, target_pitch=0
                    )

    def _entries(self, pieces: Iterable[tuple[Copy, int, int]]) -> torch.Tensor:
        """The kernel's table (`sum_pieces`), from copies with an address and a pitch in bytes."""
        entries: list[tuple[int, ...]] = []
        for copy, address, pitch in pieces:
            width = copy.row // _WORD
            exponents = self._exponents[copy.parameter]
            each = max(1, _RUN_WORDS // width)
            for run in range(0, copy.rows, each):
                for column in range(0, width, _RUN_WORDS):
                    entries.append(
                        (
                            address + run * pitch + column * _WORD,
                            min(each, copy.rows - run),
                            min(_RUN_WORDS, width - column),
                            pitch // _WORD,
                            (copy.target + run * copy.target_pitch) // _WORD + column,
                            copy.target_pitch // _WORD,
                            copy.parameter,
                            exponents,
                            0,
                        )
                    )
        table = torch.tensor(entries, dtype=torch.int64).view(-1, 9)
        return table.to(self._device)

    def _batched(self, copies: Iterable[Copy]) -> Iterator[tuple[list[Copy], torch.Tensor, int]]:
        """What is copied to spare memory before it is summed: copies whose target is that memory,
        the table to sum it by, and its size.
        """
        batch: list[tuple[Copy, Copy]] = []
        size = 0
        for copy in chain.from_iterable(cut_copy(whole, _BATCH_BYTES) for whole in copies):
            dense = replace(copy, target=size, target_pitch=copy.row)
            batch.append((copy, dense))
            size += copy.rows * copy.row
            if size >= _BATCH_BYTES:
                yield self._batch(batch, size)
                batch, size = [], 0
        if batch:
            yield self._batch(batch, size)

    def _batch(
        self, batch: Sequence[tuple[Copy, Copy]], size: int
    ) -> tuple[list[Copy], torch.Tensor, int]:
        pieces = [(copy, dense.target, copy.row) for copy, dense in batch]
        return [dense for _, dense in batch], self._entries(pieces), size

    def _sum_words(self, sums: torch.Tensor, broken: torch.Tensor) -> None:
        from skyctl.wire.triton_digest import sum_pieces

        sum_pieces(0, self._table, sums, broken)
        size = max((size for _, _, size in self._batches), default=0)
        spare = torch.empty(size, dtype=torch.uint8, device=self._device)
        for copies, table, _ in self._batches:
            for copy in copies:
                self._move(copy, spare)
            sum_pieces(spare.data_ptr(), table, sums, broken)

    def _move(self, copy: Copy, spare: torch.Tensor) -> torch.Tensor:
        """Copy out of an export into spare memory; returns the elements there."""
        chunk = self._exports[copy.chunk]
        pairs = paired_runs([copy], chunk, {copy.parameter: spare}, self._dtypes)
        target, source = next(pairs)
        target.copy_(source)
        return target

    def _sum_odd(
        self, copy: Copy, sums: torch.Tensor, broken: torch.Tensor
    ) -> Iterator[tuple[int, int, int]]:
        """Adds the whole words, and returns the bytes of the others."""
        for part in cut_copy(copy, _IMAGE_BYTES):
            first = part.target // _WORD
            at = part.target - first * _WORD
            end = at + (part.rows - 1) * part.target_pitch + part.row
            image, covered = torch.zeros(
                (2, -(-end // _WORD) * _WORD), dtype=torch.uint8, device=self._device
            )
            values = self._move(replace(part, target=at), image)
            dtype = self._dtypes[part.parameter]
            if dtype.is_floating_point and not bool(each_finite(values.view(dtype)).all()):
                broken[part.parameter] = 1
            covered.as_strided(
                (part.rows, part.row), (part.target_pitch, 1), covered.storage_offset() + at
            ).fill_(1)
            count = covered.view(-1, _WORD).sum(1)
            words = image.view(torch.int64)
            places = torch.arange(first, first + len(words), device=self._device)
            whole, cut = count == _WORD, (count > 0) & (count < _WORD)
            sums[part.parameter] += sum_of_words(words[whole], places[whole]).sum()
            for word, value in zip(places[cut].tolist(), words[cut].tolist(), strict=True):
                yield part.parameter, word, value % 2**64
