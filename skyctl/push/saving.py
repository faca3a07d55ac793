"""Write what a server computes with into a checkpoint: the inverse of a push.

    parts   each worker says which part of every tensor it has, and in which dtype
    write   they write these into one file, a few tensors a call; users are served between calls
    compare the digest is what it was before and what is on record; rows of the file are its own

It needs no layout of the model: `engines/vllm/inside/placement.py` finds the tensors.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.header import DTYPE_BITS, safetensors_name, torch_name
from skyctl.checkpoints.live import RunningModel, in_thread
from skyctl.engines.base import Server, lacks_method
from skyctl.errors import PreflightError, ServerError
from skyctl.live.blocks import Block, Target, refuse_unlike
from skyctl.live.file import lay_out
from skyctl.push.rows import read_rows
from skyctl.push.verify import HOW_TO_DIGEST, can_compare, weights_digest
from skyctl.wire.messages import ReadTensor, TensorPart, matrix_of
from skyctl.wire.worker import WorkerMethod

_CALL_BYTES = 64 << 20
"""How much a server writes at a time, at least a tensor."""
_MOST_PAUSE_S = 1.0
"""Between two calls a server serves for as long as the one before took, but no longer."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that a server has written."""

    tensors: int
    total_bytes: int
    digest: str
    """The server's weights digest."""


async def write_weights(
    server: Server, model: RunningModel, directory: Path, *, digest: str, timeout_s: float
) -> Written:
    """Have a server write its weights into the empty `directory`, which its workers must see.
    Nothing may push to it meanwhile. `digest` is the recorded one; "" if there is none.

    Raises:
        PreflightError: they cannot be written; nothing was.
        ServerError: it does not answer, or its weights are not those on record.
    """
    name = server.target.name
    tensors = await tensors_to_write(server, model, timeout_s=timeout_s)
    before = await weights_digest(server, timeout_s=timeout_s)
    if digest and digest != before.digest:
        raise ServerError(f"{name} does not hold the weights that are on record for it")
    targets = [Target(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    with await asyncio.to_thread(lay_out, directory, targets, model.config) as file:
        inode = file.path.stat().st_ino
        for group in _groups([replace(t, offset=file.places[t.name]) for t in tensors]):
            began = time.monotonic()
            rows = [asdict(tensor) for tensor in group]
            arguments = {"path": str(file.path), "inode": inode, "tensors": rows}
            await server.ask_workers(WorkerMethod.WRITE_TENSORS, arguments, timeout_s=timeout_s)
            await asyncio.sleep(min(time.monotonic() - began, _MOST_PAUSE_S))
        await in_thread(file.finish)
    checkpoint = await asyncio.to_thread(read_checkpoint, str(directory))
    rows_of_file = await asyncio.to_thread(read_rows, checkpoint)
    after = await weights_digest(server, timeout_s=timeout_s, rows=rows_of_file)
    if after.digest != before.digest:
        raise ServerError(f"{name} got other weights while its weights were saved")
    return Written(len(tensors), checkpoint.total_bytes, after.digest)


async def tensors_to_write(
    server: Server, model: RunningModel, *, timeout_s: float
) -> list[ReadTensor]:
    """What `write_weights` has the server write. Changes nothing.

    Raises:
        PreflightError: they cannot be read out of it, or not as a whole.
        ServerError: it does not answer.
    """
    name = server.target.name
    if not model.tensors:
        raise PreflightError(
            f"{name} cannot be saved: the tensors of its model are unknown on this machine"
        )
    if not can_compare(server.target):
        raise PreflightError(f"{name} cannot be saved: its engine does not let weights be read")
    tensors = [
        ReadTensor(tensor.name, torch_name(tensor.dtype, tensor.name), list(tensor.shape))
        for tensor in model.tensors
        if tensor.nbytes
    ]
    dtypes = await _dtypes(server, tensors, timeout_s=timeout_s)
    return [replace(t, dtype=dtypes[t.name]) for t in tensors if t.name in dtypes]


async def _dtypes(
    server: Server, tensors: Sequence[ReadTensor], *, timeout_s: float
) -> dict[str, str]:
    """The dtype that workers hold each tensor in; none for those that they do without.

    Raises:
        PreflightError: they cannot be read out of them, or not as a whole.
    """
    name, arguments = server.target.name, {"tensors": [asdict(tensor) for tensor in tensors]}
    try:
        answers = await server.ask_workers(
            WorkerMethod.TENSOR_PARTS, arguments, timeout_s=timeout_s
        )
    except ServerError as error:
        if lacks_method(error):
            message = f"{name} cannot be saved: it lacks skyctl's worker extension"
            raise PreflightError(message, hint=HOW_TO_DIGEST) from error
        raise
    workers = [[TensorPart(**part) for part in answer] for answer in answers]
    if reason := next((f"{p.name}: {p.reason}" for own in workers for p in own if p.reason), ""):
        raise PreflightError(f"{name} cannot be saved: {reason}")
    held_as = {part.name: part.dtype for own in workers for part in own if part.boxes}
    matrices = {tensor.name: matrix_of(tensor.shape) for tensor in tensors}
    blocks = [
        [
            Block(p.name, p.dtype, matrices[p.name], (row, column), (height, width))
            for p in own
            for row, column, height, width in p.boxes
        ]
        for own in workers
    ]
    try:
        targets = [Target(tensor, dtype, matrices[tensor]) for tensor, dtype in held_as.items()]
        refuse_unlike(blocks, targets)
    except PreflightError as error:
        raise PreflightError(f"{name} cannot be saved: {error.message}") from error
    return held_as


def _groups(tensors: Sequence[ReadTensor]) -> Iterator[list[ReadTensor]]:
    group: list[ReadTensor] = []
    size = 0
    for tensor in tensors:
        bits = DTYPE_BITS[safetensors_name(tensor.dtype, tensor.name)]
        nbytes = math.prod(tensor.shape) * bits // 8
        if group and size + nbytes > _CALL_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += nbytes
    if group:
        yield group
