"""The tensors a stub was given, and its answers to questions about their rows."""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.header import DTYPE_BITS, torch_name
from skyctl.errors import SkyctlError
from skyctl.wire.messages import (
    ReadTensor,
    RowAnswer,
    RowQuestion,
    TensorPart,
    matrix_of,
    row_number,
)
from tests.unit.push.checkpoints import tiny_tensors

KEPT_BYTES = 4 * 1024 * 1024
"""Larger tensors are not kept: a stub stands in for models of any size."""
_TICK_S = 1.0

Contents = dict[str, tuple[str, bytes]]
"""torch's dtype and the bytes, by name."""
Files = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of each."""


def of_checkpoint(directory: str) -> Contents:
    """The tensors of a checkpoint directory; nothing where it is none."""
    files = _settled(directory)
    return dict(_read_once(directory, files)) if files else _read(directory)


def checksums_of_checkpoint(directory: str) -> dict[str, int]:
    """The crc32 of each of them."""
    files = _settled(directory)
    return dict(_summed_once(directory, files)) if files else _summed(_read(directory))


def _settled(directory: str) -> Files:
    """What tells the files of a directory from those of another time; nothing where one has just
    been written: within a tick of the clock it may be written again."""
    try:
        found = [(one.name, one.stat()) for one in Path(directory).iterdir()]
    except OSError:
        return ()
    if any(abs(time.time() - stat.st_ctime) < _TICK_S for _, stat in found):
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_ctime_ns) for name, s in found))


@lru_cache(maxsize=8)
def _read_once(directory: str, files: Files) -> Contents:
    return _read(directory)


@lru_cache(maxsize=8)
def _summed_once(directory: str, files: Files) -> dict[str, int]:
    return _summed(_read_once(directory, files))


def _summed(tensors: Contents) -> dict[str, int]:
    return {name: zlib.crc32(data) for name, (_, data) in tensors.items()}


def _read(directory: str) -> Contents:
    if not Path(directory).is_dir():
        return {}
    try:
        checkpoint = read_checkpoint(directory)
    except SkyctlError:
        return {}
    found: Contents = {}
    for tensor in checkpoint.tensors:
        if DTYPE_BITS[tensor.dtype] >= 8 and tensor.nbytes <= KEPT_BYTES:
            with Path(checkpoint.shards[tensor.shard].path).open("rb") as file:
                file.seek(tensor.begin)
                dtype = torch_name(tensor.dtype, tensor.name)
                found[tensor.name] = (dtype, file.read(tensor.nbytes))
    return found


def from_trainer(seed: int) -> Contents:
    """The tensors that a trainer of tests sends: others for every seed."""
    tensors = {name: ("float32", data) for name, (_, _, data) in tiny_tensors(seed).items()}
    dtype, data = tensors["model.norm.weight"]
    return tensors | {"model.norm.weight": (dtype, struct.pack("<f", seed) + data[4:])}


def trainers_update(seed: int) -> dict[str, Any]:
    """What it sends of them: the seed stands for their bytes."""
    tensors = from_trainer(seed)
    return {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [shape for _, shape, _ in tiny_tensors().values()],
        "crc32": list(_summed(tensors).values()),
        "seed": seed,
    }


def of_update(init_info: Mapping[str, Any], update: Mapping[str, Any]) -> Contents:
    """The tensors of one chunk in the sender's shared memory, or of a trainer; nothing by other
    transports.
    """
    if "seed" in update:
        return from_trainer(update["seed"])
    endpoint = init_info.get("endpoint", {})
    if "fds" not in endpoint or "offsets" not in update:
        return {}
    path = f"/proc/{endpoint['pid']}/fd/{endpoint['fds'][update['slot']]}"
    found: Contents = {}
    columns = (update[key] for key in ("names", "dtype_names", "shapes", "offsets"))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for name, dtype, shape, offset in zip(*columns, strict=True):
            size = _itemsize(dtype)
            for length in shape:
                size *= length
            if size <= KEPT_BYTES:
                found[name] = (dtype, os.pread(descriptor, size, offset))
    finally:
        os.close(descriptor)
    return found


def answers(contents: Contents, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As a worker that holds all of a model as it is in the checkpoint."""
    return [vars(_answer(contents, RowQuestion(**asked))) for asked in questions]


def _answer(contents: Contents, question: RowQuestion) -> RowAnswer:
    if question.name not in contents:
        return RowAnswer(question.name, reason="the stub did not see its bytes")
    dtype, data = contents[question.name]
    size, (_, width) = _itemsize(dtype), question.matrix
    begin, end = question.begin, question.end
    pieces = []
    for row in question.rows:
        part = data[(row * width + begin) * size : (row * width + end) * size]
        pieces.append((row, begin, end, row_number(part, dtype)))
    return RowAnswer(question.name, dtype, pieces)


def _itemsize(dtype: str) -> int:
    by_name = {torch_name(name, ""): bits // 8 for name, bits in DTYPE_BITS.items() if bits >= 8}
    return by_name[dtype]


def parts(contents: Contents, tensors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What every worker of a stub has of tensors: all."""
    answer = []
    for tensor in (ReadTensor(**tensor) for tensor in tensors):
        if tensor.name in contents:
            boxes = [[0, 0, *matrix_of(tensor.shape)]]
            part = TensorPart(tensor.name, contents[tensor.name][0], boxes)
        else:
            part = TensorPart(tensor.name, reason="the stub has not kept it")
        answer.append(asdict(part))
    return answer


def write(contents: Contents, path: str, inode: int, tensors: Sequence[Mapping[str, Any]]) -> None:
    """Write tensors to their places in a file."""
    with Path(path).open("r+b") as file:
        assert os.fstat(file.fileno()).st_ino == inode
        for tensor in (ReadTensor(**tensor) for tensor in tensors):
            os.pwrite(file.fileno(), contents[tensor.name][1], tensor.offset)
