"""Write a safetensors checkpoint tensor by tensor, each byte once, in the order they come.

A shard's header stands before its tensors but is known only after them: room for it is kept free
and what is left of that is filled with spaces, as the format allows.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from skyctl.checkpoints.checkpoint import INDEX_NAME
from skyctl.errors import PreflightError, SkyctlError

HEADER_BYTES = 256 * 1024
"""Length of each shard's header; with its 8 bytes of length the tensors start aligned."""

_LENGTH_BYTES = 8
_METADATA = {"__metadata__": {"format": "pt"}}


@dataclass
class _Part:
    """A shard being written. `header` maps tensor names to their entries."""

    path: Path
    file: IO[bytes]
    header: dict[str, Any] = field(default_factory=lambda: dict(_METADATA))
    header_bytes: int = len(json.dumps(_METADATA))
    data_bytes: int = 0

    @property
    def names(self) -> list[str]:
        return [name for name in self.header if name not in _METADATA]


class CheckpointWriter:
    """Fills an empty directory with a checkpoint. It is one only once `finish` has returned.

    Leaving the `with` block closes the files, whatever happened.
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
            part.file.close()

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append one tensor. `dtype` is the safetensors name; `data` its bytes, row by row.

        Raises:
            PreflightError: the name was used before, or is no name.
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
            raise SkyctlError(
                f"{name} cannot be written to {self._directory}: {error.strerror}",
                hint="make room there, or point SKYCTL_HOME elsewhere",
            ) from error
        part.header[name] = _entry(dtype, shape, part.data_bytes, data.nbytes)
        part.header_bytes += entry_bytes
        part.data_bytes += data.nbytes
        self._names.add(name)

    def finish(self) -> None:
        """Write headers, names, index and config.json. Raises PreflightError without a tensor."""
        if not self._parts:
            raise PreflightError("there are no weights to push: the iterator was empty")
        weight_map: dict[str, str] = {}
        for number, part in enumerate(self._parts, start=1):
            name = "model.safetensors"
            if len(self._parts) > 1:
                name = f"model-{number:05d}-of-{len(self._parts):05d}.safetensors"
            _close(part, self._directory / name)
            weight_map.update(dict.fromkeys(part.names, name))
        if len(self._parts) > 1:
            total = sum(part.data_bytes for part in self._parts)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._directory / INDEX_NAME).write_text(json.dumps(index))
        (self._directory / "config.json").write_text(json.dumps(self._config))

    def _part_for(
        self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int
    ) -> tuple[_Part, int]:
        """The shard that takes this tensor, and what its entry adds to the header at most."""
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


def _close(part: _Part, path: Path) -> None:
    header = json.dumps(part.header).encode().ljust(HEADER_BYTES)
    part.file.seek(0)
    part.file.write(struct.pack("<Q", HEADER_BYTES) + header)
    part.file.close()
    part.path.rename(path)
