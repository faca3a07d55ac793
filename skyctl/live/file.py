"""A checkpoint in memory that the ranks of a trainer fill together, each with its own blocks.

The file is laid out once; each rank maps it, and copies what it sends to its place, cast on the
way. After the next step the same bytes are written again.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyctl.checkpoints.header import DTYPE_BITS, safetensors_name, torch_name
from skyctl.checkpoints.live import (
    HEADER_BYTES,
    NamedTensors,
    RunningModel,
    TensorFile,
    each_tensor,
    header_bytes_for,
    in_thread,
    memory_of,
    synchronize,
)
from skyctl.errors import PreflightError
from skyctl.live.blocks import Block, Target
from skyctl.live.model import Pair, read_pairs


def targets_of(running: RunningModel) -> list[Target]:
    """The tensors of the running model; none where it is unknown."""
    return [
        Target(tensor.name, torch_name(tensor.dtype, tensor.name), tensor.shape)
        for tensor in running.tensors
    ]


def lay_out(directory: Path, targets: Iterable[Target], config: Mapping[str, Any]) -> TensorFile:
    """A file with room for these tensors, taken at once.

    Wide elements come first, so that each tensor begins at a multiple of its element's size.

    Raises:
        SkyctlError: there is no room for it.
    """
    rows = [
        (target.name, safetensors_name(target.dtype, target.name), target.shape)
        for target in targets
    ]
    rows.sort(key=lambda row: -DTYPE_BITS[row[1]])
    file = TensorFile(directory, config, header_bytes=header_bytes_for(rows))
    try:
        for name, dtype, shape in rows:
            file.place(name, dtype, shape, math.prod(shape) * DTYPE_BITS[dtype] // 8)
        file.allocate()
    except BaseException:
        file.close()
        raise
    return file


class Window:
    """A file of `lay_out` in the memory of a rank."""

    def __init__(self, path: Path) -> None:
        import torch

        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._octets = torch.frombuffer(self._map, dtype=torch.uint8)

    def write(self, sent: Sequence[tuple[Block, int, Any]], *, scan: bool) -> str:
        """Copy blocks, each of a tensor at this offset and with these values, to their places.

        Returns:
            With `scan`, the first tensor that holds NaN or infinity as it is sent; "" if none does.
        """
        import torch

        from skyctl.wire.finite import all_finite

        not_finite = ""
        synchronize(local for _, _, local in sent)
        with torch.no_grad():
            for block, offset, local in sent:
                dtype = getattr(torch, block.dtype)
                length = math.prod(block.shape) * dtype.itemsize
                whole = self._octets[offset : offset + length].view(dtype).view(block.shape)
                spans = zip(block.start, block.size, strict=True)
                place = whole[tuple(slice(start, start + size) for start, size in spans)]
                place.copy_(local)
                floats = scan and place.numel() and place.is_floating_point()
                if floats and not not_finite and not bool(all_finite(place)):
                    not_finite = block.tensor
        return not_finite


async def write_tensors(
    tensors: NamedTensors, directory: Path, *, running: RunningModel, dtype: str | None
) -> None:
    """Write the tensors of a single process into the empty `directory` as a checkpoint of the model
    that is running.

    Each is brought to host memory and written before the next is requested; only one is in host
    memory at a time. `dtype` as `live.model.read_pairs` takes it.

    Raises:
        PreflightError: a tensor is not the model's, or has another shape or dtype.
        UsageError: something that is not a tensor was given, or `dtype` is unknown.
    """
    targets = targets_of(running)
    rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in running.tensors]
    header_bytes = max(header_bytes_for(rows) * 2, 4096) if rows else HEADER_BYTES
    with TensorFile(directory, running.config, header_bytes=header_bytes) as file:

        def add(pairs: Sequence[Pair]) -> None:
            synchronize(local for _, local in pairs)
            for block, local in pairs:
                _refuse_part(block)
                name = block.tensor
                dtype = safetensors_name(block.dtype, name)
                # converted in place, so that fewer bytes leave a GPU
                plain = local.to(dtype=_torch_dtype(block.dtype)).to("cpu").contiguous()
                file.add(name, dtype, block.shape, memory_of(plain))

        if isinstance(tensors, Mapping) or hasattr(tensors, "state_dict"):
            await in_thread(add, read_pairs(tensors, targets, dtype=dtype))
        else:
            async for name, tensor in each_tensor(tensors):
                await in_thread(add, read_pairs({name: tensor}, targets, dtype=dtype))
        await in_thread(file.finish)


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _refuse_part(block: Block) -> None:
    if block.size != block.shape:
        raise PreflightError(
            f"{block.tensor} is sharded over several processes (a DTensor)",
            hint="push from every rank: live = await fleet.trainer(model)",
        )
