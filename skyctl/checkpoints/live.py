"""A checkpoint that a running program writes from its memory, and the model that it must fit.

The caller's program brings torch; it is imported only where a tensor becomes bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from skyctl.checkpoints.checkpoint import locate, read_config
from skyctl.checkpoints.compat import read_base
from skyctl.checkpoints.header import Tensor
from skyctl.children import to_its_end
from skyctl.errors import PreflightError, SkyctlError

T = TypeVar("T")

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]]
"""A state dict, or an iterator (plain or async) of (name, torch.Tensor)."""

_PAGE = 4096
_LENGTH_BYTES = 8
HEADER_BYTES = 8 * 1024 * 1024 - _LENGTH_BYTES
"""Room for the header where the tensors are not known before: about 80,000. What is not used costs
a few milliseconds a read.
"""
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


def memory_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    import torch

    # a single value counts as contiguous whatever its stride, and then has no view as bytes
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def synchronize(tensors: Iterable[Any]) -> None:
    """Wait for the devices of these: the trainer's other streams may still write."""
    import torch

    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


async def each_tensor(tensors: NamedTensors) -> AsyncIterator[tuple[str, Any]]:
    if isinstance(tensors, Mapping):
        tensors = tensors.items()
    if isinstance(tensors, AsyncIterable):
        async for name, tensor in tensors:
            yield name, tensor
    else:
        for name, tensor in tensors:
            yield name, tensor


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call without blocking the loop; a cancellation waits until it ends."""
    # what it writes may be closed afterwards, or written by others
    return await to_its_end(asyncio.to_thread(call, *arguments))


class TensorFile:
    """A checkpoint in a single file, `model.safetensors` of an empty `directory`: tensors get their
    places first, or one by one, and are written in any order. It is a checkpoint once `finish` has
    returned, and after `invalidate` it is none.

    The header precedes the tensors, but is known only after them: `header_bytes` are kept free, and
    what remains of these is filled with spaces, as the format allows. Leaving the `with` block
    closes the file. Format: https://huggingface.co/docs/safetensors
    """

    def __init__(
        self, directory: Path, config: Mapping[str, Any], *, header_bytes: int = HEADER_BYTES
    ) -> None:
        self.path = directory / "model.safetensors"
        self._config = config
        self._header_bytes = header_bytes
        self._header: dict[str, Any] = dict(_METADATA)
        self.places: dict[str, int] = {}
        self._length = _LENGTH_BYTES + header_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> int:
        """The offset of a tensor in the file, behind those before it. `dtype` is the safetensors
        name.

        Raises:
            PreflightError: the name was used before, or is invalid.
        """
        if name in _METADATA or not name:
            raise PreflightError(f"{name!r} cannot be a tensor's name")
        if name in self._header:
            raise PreflightError(f"{name} came twice")
        begin = self._length - _LENGTH_BYTES - self._header_bytes
        self._header[name] = _entry(dtype, shape, begin, nbytes)
        offset = self.places[name] = self._length
        self._length += nbytes
        return offset

    def allocate(self) -> None:
        """Take the room that all placed tensors need. Raises SkyctlError if there is none."""
        try:
            os.posix_fallocate(self._descriptor, 0, self._length)
        except OSError as error:
            raise self._unwritten("the weights", error) from error

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Place a tensor and write its bytes. Raises as `place`, and SkyctlError without room."""
        offset, done = self.place(name, dtype, shape, data.nbytes), 0
        try:
            while done < data.nbytes:  # one call moves at most 2 GiB
                done += os.pwrite(self._descriptor, data[done:], offset + done)
        except OSError as error:
            raise self._unwritten(name, error) from error

    def invalidate(self) -> None:
        """From here on it cannot be read as what it was, nor for what it was."""
        os.pwrite(self._descriptor, bytes(_LENGTH_BYTES), 0)

    def finish(self) -> None:
        """Write the header and config.json. May be called again, after `invalidate`.

        Raises:
            PreflightError: there is no tensor.
            SkyctlError: there is no room for them.
        """
        if len(self._header) == len(_METADATA):
            raise PreflightError("there are no weights to push: the iterator was empty")
        header = json.dumps(self._header).encode().ljust(self._header_bytes)
        if len(header) > self._header_bytes:
            raise PreflightError(
                f"the names of {len(self._header) - 1} tensors are too long for the header of a "
                "checkpoint that is written tensor by tensor",
                hint="give a state dict instead of an iterator",
            )
        try:
            os.pwrite(self._descriptor, header, _LENGTH_BYTES)
            os.pwrite(self._descriptor, struct.pack("<Q", self._header_bytes), 0)
            (self.path.parent / "config.json").write_text(json.dumps(self._config))
        except OSError as error:
            raise self._unwritten("the checkpoint", error) from error

    def close(self) -> None:
        """A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _unwritten(self, name: str, error: OSError) -> SkyctlError:
        return SkyctlError(
            f"{name} cannot be written to {self.path.parent}: {error.strerror}",
            hint="make room there, or point SKYCTL_HOME elsewhere",
        )


def header_bytes_for(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """Room for the header of these tensors (name, safetensors dtype, shape), wherever they lie."""
    entries = {name: _entry(dtype, shape, 2**52, 2**52) for name, dtype, shape in tensors}
    size = len(json.dumps(_METADATA | entries))
    return -(-size // _PAGE) * _PAGE - _LENGTH_BYTES


def _entry(dtype: str, shape: tuple[int, ...], begin: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
