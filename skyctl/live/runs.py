"""What blocks of a tensor have in common, as runs of elements: arithmetic of the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from skyctl.live.blocks import Box
from skyctl.wire.layouts import Part, Runs

_CUT = 64
"""A run that is split is cut at multiples of this, in bytes of the parameter."""


class _Runs(NamedTuple):
    """Runs of elements in a row-major tensor, and where they lie in other memory."""

    first: int
    rows: int
    row: int
    pitch: int
    at: int
    at_pitch: int


def split(common: Runs, count: int, item: int) -> Iterator[Runs]:
    """At most `count` parts of about the same size."""
    rows, row, source, source_pitch, target, target_pitch = common
    if rows >= count:
        edges = [rows * number // count for number in range(count + 1)]
        for begin, end in pairwise(edges):
            yield (
                *(end - begin, row, source + begin * source_pitch, source_pitch),
                *(target + begin * target_pitch, target_pitch),
            )
        return
    if rows > 1:
        yield common
        return
    step = max(1, _CUT // item)
    edges = [row * number // count // step * step for number in range(count)] + [row]
    for begin, end in pairwise(edges):
        if begin < end:
            size = end - begin
            yield 1, size, source + begin, size, target + begin, size


def overlap(part: Part, shape: Sequence[int], box: Box) -> Iterator[Runs]:
    """The elements of a part that lie in a box of its tensor."""
    rows, row, source, source_pitch, target, target_pitch = part.runs
    if rows > 1 and source_pitch == target_pitch == row:
        rows, row = 1, rows * row
    inside = _Runs(source, rows, row, source_pitch, target, target_pitch)
    for runs in _runs_of(shape, box):
        for first, count, size, pitch in _overlaps(inside, runs):
            (source, source_pitch), (target, target_pitch) = (
                _located(where, first, pitch) for where in (runs, inside)
            )
            yield count, size, source, source_pitch, target, target_pitch


def span(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """The first element of a box in its tensor, and the one after its last."""
    first = last = 0
    for length, start, size in zip(shape, *box, strict=True):
        first = first * length + start
        last = last * length + start + size - 1
    return first, last + 1


def _located(runs: _Runs, first: int, pitch: int) -> tuple[int, int]:
    """Where element `first` of the tensor lies in the other memory, and how far from there it is to
    the element `pitch` further on.
    """
    number = (first - runs.first) // runs.pitch if runs.rows > 1 else 0
    place = runs.at + number * runs.at_pitch + first - runs.first - number * runs.pitch
    return place, runs.at_pitch if runs.rows > 1 and pitch == runs.pitch else pitch


def _runs_of(shape: Sequence[int], box: Box) -> Iterator[_Runs]:
    """The runs of a box in its tensor, and where each lies in the box's own memory."""
    start, size = box
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    axis = len(shape) - 1
    while axis > 0 and size[axis] == shape[axis]:
        axis -= 1
    row = size[axis] * strides[axis] if shape else 1
    outer = axis - 1
    while outer >= 0 and size[outer] == 1:
        outer -= 1
    rows, pitch = (size[outer], strides[outer]) if outer >= 0 else (1, row)
    while outer > 0 and size[outer] == shape[outer]:
        outer -= 1
        rows *= size[outer]
    beyond = range(max(outer, 0))
    for number, index in enumerate(product(*(range(size[axis]) for axis in beyond))):
        at = first + sum(place * strides[axis] for axis, place in zip(beyond, index, strict=True))
        yield _Runs(at, rows, row, pitch, number * rows * row, row)


def _overlaps(a: _Runs, b: _Runs) -> Iterator[tuple[int, int, int, int]]:
    """First element, number, length and pitch of the runs that two sets have in common."""
    if a.rows == 1:
        yield from _clipped(b, a.first, a.first + a.row)
    elif b.rows == 1:
        yield from _clipped(a, b.first, b.first + b.row)
    elif a.pitch == b.pitch and (common := _columns(a, b)) is not None:
        if common[1] > 0 and common[2] > 0:
            yield common
    else:
        for number in range(a.rows):
            begin = a.first + number * a.pitch
            yield from _clipped(b, begin, begin + a.row)


def _columns(a: _Runs, b: _Runs) -> tuple[int, int, int, int] | None:
    """What two blocks of a matrix have in common; None if either is none."""
    pitch = a.pitch
    (a_row, a_column), (b_row, b_column) = divmod(a.first, pitch), divmod(b.first, pitch)
    if max(a_column + a.row, b_column + b.row) > pitch:
        return None
    top, side = max(a_row, b_row), max(a_column, b_column)
    height = min(a_row + a.rows, b_row + b.rows) - top
    width = min(a_column + a.row, b_column + b.row) - side
    return top * pitch + side, height, width, pitch


def _clipped(runs: _Runs, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The runs, as far as they lie between two elements of the tensor."""
    first, rows, row, pitch = runs[:4]
    low = max(0, (begin - first - row) // pitch + 1)
    high = min(rows, -((first - end) // pitch))
    for number in (low, high - 1):  # only the first and the last may be cut
        at = first + number * pitch
        inside = max(at, begin), min(at + row, end)
        if low < high and inside != (at, at + row):
            size = inside[1] - inside[0]
            yield inside[0], 1, size, size
            low, high = (low + 1, high) if number == low else (low, high - 1)
    if low < high:
        yield first + low * pitch, high - low, row, pitch
