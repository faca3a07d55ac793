"""Write named tensors of a running program as a checkpoint, checking them on the way.

The caller's program brings torch; it is imported only where a tensor becomes bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from skyctl.checkpoints.checkpoint import INDEX_NAME, locate, read_config
from skyctl.checkpoints.compat import read_base
from skyctl.checkpoints.dtypes import safetensors_name, torch_name
from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError, SkyctlError, UsageError

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
"""A state dict, or an iterator (plain or async) of (name, torch.Tensor)."""

AS_IS, MATCH = "as-is", "match"

HEADER_BYTES = 256 * 1024
"""Length of each shard's header; with the 8 bytes of its length field, tensors start aligned."""

_LENGTH_BYTES = 8
_METADATA = {"__metadata__": {"format": "pt"}}


@dataclass(frozen=True)
class RunningModel:
    """What the servers run, as far as this machine can tell; otherwise empty."""

    tensors: tuple[Tensor, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int | None:
        return sum(tensor.nbytes for tensor in self.tensors) or None


def running_model(path: str | None) -> RunningModel:
    """The model at `path`, a directory or a hub id in the local cache.

    Raises:
        PreflightError: the checkpoint there is broken.
    """
    directory = locate(path) if path else None
    if path is None or directory is None or not (directory / "config.json").exists():
        return RunningModel()
    if not any(directory.glob("*.safetensors")):  # loaded with dummy weights
        return RunningModel(config=read_config(directory))
    base = read_base(path)
    return RunningModel(base.tensors, base.config)


async def write_tensors(
    tensors: NamedTensors, directory: Path, *, running: RunningModel, dtype: str | None
) -> None:
    """Write `tensors` into the empty `directory` as a checkpoint of the model that is running.

    Each tensor is brought to host memory and written before the next is requested; only one is in
    host memory at a time. `dtype` is "as-is", "match" (each as it is running), a torch dtype by
    name for all floating-point tensors, or None: a dtype other than the running one is refused.

    Raises:
        PreflightError: a tensor is not the model's, or has another shape or dtype.
        UsageError: something that is not a tensor was given, or `dtype` is unknown.
    """
    conversion = _Conversion(running, dtype)
    with CheckpointWriter(directory, running.config) as writer:

        def take(name: str, tensor: Any) -> None:
            writer.add(name, *conversion.bytes_of(name, tensor))

        async for name, tensor in each_tensor(tensors):
            await _in_thread(take, name, tensor)
        await _in_thread(writer.finish)


class _Conversion:
    """What each tensor must be, and what it is converted to."""

    def __init__(self, running: RunningModel, dtype: str | None) -> None:
        self._running = {tensor.name: tensor for tensor in running.tensors}
        self._dtype = dtype
        if dtype == MATCH and not self._running:
            raise UsageError(
                'dtype="match" needs the checkpoint the servers run on this machine',
                hint='name the dtype, such as dtype="bfloat16"',
            )

    def bytes_of(self, name: str, tensor: Any) -> tuple[str, tuple[int, ...], memoryview]:
        """Safetensors dtype, shape and bytes of a tensor. Raises as `write_tensors`."""
        import torch

        _require_plain_tensor(name, tensor)
        running = self._running.get(name)
        shape = tuple(tensor.shape)
        if running is None:
            for ending in self._running:
                if name.endswith(f".{ending}"):
                    prefix = name.removesuffix(ending)
                    raise PreflightError(
                        f"{name} is not in the model the servers run; {ending} is",
                        hint=f"name it so: name.removeprefix({prefix!r})",
                    )
        elif running.shape != shape:
            raise PreflightError(
                f"{name} is {list(shape)} here, the servers run {list(running.shape)}"
            )
        tensor = tensor.detach()
        dtype = self._target_dtype(name, tensor, running)
        # converted in place, so that fewer bytes leave a GPU
        plain = tensor.to(dtype=getattr(torch, dtype)).to("cpu").contiguous()
        return safetensors_name(dtype, name), shape, memory_of(plain)

    def _target_dtype(self, name: str, tensor: Any, running: Tensor | None) -> str:
        """The torch dtype, by name, that a tensor is sent as."""
        own = str(tensor.dtype).removeprefix("torch.")
        theirs = torch_name(running.dtype, name) if running is not None else own
        if self._dtype is None and theirs != own:
            raise PreflightError(
                f"{name} is {own} here, {theirs} in the checkpoint the servers run",
                hint='convert on purpose: dtype="match"; or let the servers cast: dtype="as-is"',
            )
        if self._dtype in (None, AS_IS):
            return own
        if self._dtype == MATCH:
            return theirs
        return self._dtype if tensor.is_floating_point() else own


def dtype_name(dtype: object) -> str | None:
    """ "as-is", "match", or a torch dtype's name (given by name or as the dtype); None unchanged.

    Raises:
        UsageError: torch has no such dtype.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name in (AS_IS, MATCH):
        return name
    import torch

    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise UsageError(
            f"{name!r} is not a dtype of torch",
            hint='give one such as "bfloat16", or "match", or "as-is"',
        )
    return name


def _require_plain_tensor(name: object, tensor: Any) -> None:
    if not isinstance(name, str) or not hasattr(tensor, "detach"):
        raise UsageError(
            f"weights are pairs of a name and a torch.Tensor, not of {type(name).__name__} and "
            f"{type(tensor).__name__}",
            hint="give model.state_dict() or model.named_parameters()",
        )
    if hasattr(tensor, "full_tensor"):
        raise UsageError(
            f"{name} is sharded over several processes (a DTensor)",
            hint="gather it first: (name, tensor.full_tensor())",
        )
    if tensor.device.type == "meta":
        raise UsageError(f"{name} is on the meta device: it has no values")
    if str(tensor.layout) != "torch.strided":
        raise UsageError(f"{name} is {tensor.layout}", hint="give tensor.to_dense()")


def memory_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    import torch

    # a single value counts as contiguous whatever its stride, and then has no view as bytes
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


async def each_tensor(tensors: NamedTensors) -> AsyncIterator[tuple[str, Any]]:
    if isinstance(tensors, Mapping):
        tensors = tensors.items()
    if isinstance(tensors, AsyncIterable):
        async for name, tensor in tensors:
            yield name, tensor
    else:
        for name, tensor in tensors:
            yield name, tensor


async def _in_thread(call: Any, *arguments: Any) -> None:
    """Run a blocking call without blocking the loop; a cancellation waits until it ends."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        # the file it writes is about to be closed
        await asyncio.wait([running])
        raise


@dataclass
class _Part:
    """A shard being written."""

    path: Path
    """The file's path."""
    file: IO[bytes]
    """The open file."""
    header: dict[str, Any] = field(default_factory=lambda: dict(_METADATA))
    """Entries of its tensors, by name."""
    header_bytes: int = len(json.dumps(_METADATA))
    """Size of the header so far."""
    data_bytes: int = 0
    """Size of the tensors so far."""


class CheckpointWriter:
    """Fills an empty directory with a safetensors checkpoint, tensor by tensor, each byte once, in
    the order they arrive. It is a checkpoint only once `finish` has returned.

    A shard's header precedes its tensors but is known only after them: room for it is kept free,
    and the remainder is filled with spaces, as the format allows. Leaving the `with` block closes
    the files in any case. Format: https://huggingface.co/docs/safetensors
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory = directory
        self._config = config
        self._parts: list[_Part] = []
        self._names: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            with suppress(OSError):  # of what could not be written: that was reported
                part.file.close()

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append one tensor. `dtype` is the safetensors name; `data` its bytes, row by row.

        Raises:
            PreflightError: the name was used before, or is invalid.
            SkyctlError: there is no room for it.
        """
        if name in self._names:
            raise PreflightError(f"{name} came twice")
        if name in _METADATA or not name:
            raise PreflightError(f"{name!r} cannot be a tensor's name")
        part, entry_bytes = self._part_for(name, dtype, shape, data.nbytes)
        try:
            part.file.write(data)
        except OSError as error:
            raise self._unwritten(name, error) from error
        part.header[name] = _entry(dtype, shape, part.data_bytes, data.nbytes)
        part.header_bytes += entry_bytes
        part.data_bytes += data.nbytes
        self._names.add(name)

    def finish(self) -> None:
        """Write headers, names, index and config.json.

        Raises:
            PreflightError: there is no tensor.
            SkyctlError: there is no room for them.
        """
        if not self._parts:
            raise PreflightError("there are no weights to push: the iterator was empty")
        count = len(self._parts)
        weight_map: dict[str, str] = {}
        try:
            for number, part in enumerate(self._parts, start=1):
                name = "model.safetensors"
                if count > 1:
                    name = f"model-{number:05d}-of-{count:05d}.safetensors"
                header = json.dumps(part.header).encode().ljust(HEADER_BYTES)
                part.file.seek(0)
                part.file.write(struct.pack("<Q", HEADER_BYTES) + header)
                part.file.close()
                part.path.rename(self._directory / name)
                weight_map |= {tensor: name for tensor in part.header if tensor not in _METADATA}
            if count > 1:
                total = sum(part.data_bytes for part in self._parts)
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (self._directory / INDEX_NAME).write_text(json.dumps(index))
            (self._directory / "config.json").write_text(json.dumps(self._config))
        except OSError as error:
            raise self._unwritten("the checkpoint", error) from error

    def _unwritten(self, name: str, error: OSError) -> SkyctlError:
        return SkyctlError(
            f"{name} cannot be written to {self._directory}: {error.strerror}",
            hint="make room there, or point SKYCTL_HOME elsewhere",
        )

    def _part_for(
        self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> tuple[_Part, int]:
        """The shard for this tensor, and the most that its entry adds to the header."""
        part = self._parts[-1] if self._parts else self._new_part()
        for _ in range(2):
            entry = {name: _entry(dtype, shape, part.data_bytes, nbytes)}
            entry_bytes = len(json.dumps(entry))
            if part.header_bytes + entry_bytes <= HEADER_BYTES:
                return part, entry_bytes
            part = self._new_part()
        raise PreflightError(f"the name {name[:60]}… is too long for a tensor")

    def _new_part(self) -> _Part:
        path = self._directory / f"part-{len(self._parts) + 1:05d}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "wb")
        file.seek(_LENGTH_BYTES + HEADER_BYTES)
        self._parts.append(_Part(path, file))
        return self._parts[-1]


def _entry(dtype: str, shape: tuple[int, ...], begin: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
