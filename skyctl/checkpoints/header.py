"""Read one safetensors header, trusting nothing in it; its element types, without torch.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian length, that many bytes of
JSON, then the tensors' bytes without gaps).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skyctl.errors import NotFoundError, PreflightError

_DTYPES = {
    "BOOL": (8, "bool"),
    "F4": (4, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
    "C64": (64, "complex64"),
}
"""Bits per element of every dtype a safetensors header may name, and torch's name for it; "" for
packed types that torch lacks.
"""

DTYPE_BITS = {name: bits for name, (bits, _) in _DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MAX_DIMENSIONS = 64
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_SHARDS_KEPT = 64
_parsed: dict[tuple[str, int, int], tuple[Tensor, ...]] = {}
"""The latest headers' tensors, by header digest, size of the data after it and shard number."""

K = TypeVar("K")
T = TypeVar("T")


def remembered(cache: dict[K, T], key: K, make: Callable[[], T], *, kept: int = 16) -> T:
    """What `make` returns, or returned for this key unless `kept` others were used since; None is
    not kept. Versions of a model have thousands of tensors in common, and what follows from them.
    """
    value = cache.pop(key, None)
    if value is None:
        value = make()
    cache[key] = value
    while len(cache) > kept:
        cache.pop(next(iter(cache)), None)
    return value


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint."""

    name: str
    """Its name."""
    dtype: str
    """Its safetensors dtype (`BF16`)."""
    shape: tuple[int, ...]
    """Its sizes."""
    shard: int
    """Number of its file."""
    begin: int
    """Offset of its bytes in the file."""
    nbytes: int
    """Number of its bytes."""


@dataclass(frozen=True)
class FileIdentity:
    """Equal as long as no program has written to a file or replaced it."""

    device: int
    """The file system's number."""
    inode: int
    """The file's number on it."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """When it was written; programs can set it back (`cp -p`, `rsync -t`, `os.utime`)."""
    ctime_ns: int
    """When it was changed; only the kernel sets it."""

    @classmethod
    def of_status(cls, status: os.stat_result) -> FileIdentity:
        """From what the kernel answers about an open file or a path."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


@dataclass(frozen=True)
class Shard:
    """One safetensors file as of when its header was read."""

    path: str
    """With links resolved."""
    identity: FileIdentity
    """Tells whether it was written to since."""
    header_digest: str
    """Of its raw header (`digest_header`)."""

    @property
    def name(self) -> str:
        return Path(self.path).name

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Shard:
        """Inverse of `asdict`."""
        return cls(**{**data, "identity": FileIdentity(**data["identity"])})


def read_header(path: Path, shard: int = 0) -> tuple[Shard, list[Tensor]]:
    """The identity of a safetensors file and its tensors, in file order. Reads only the header.

    Raises:
        PreflightError: the file is not a well-formed safetensors file; names file and tensor.
        NotFoundError: there is no such file.
    """
    try:
        real = path.resolve(strict=True)
        _require_plain(real)
        with real.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = read_raw_header(file.fileno(), path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the name
        raise PreflightError(f"{path} cannot be read: {error}") from error
    start, digest = _LENGTH_BYTES + len(raw), digest_header(raw)
    return (
        Shard(str(real), FileIdentity.of_status(status), digest),
        list(_tensors(raw, digest, status.st_size - start, shard, path)),
    )


def read_json(path: Path) -> Any:
    """What a plain file holds. Raises OSError, ValueError, RecursionError."""
    return json.loads(read_plain(path).decode("utf-8"))


def read_plain(path: Path) -> bytes:
    """The bytes of a plain file. Raises OSError."""
    _require_plain(path)
    return path.read_bytes()


def _require_plain(path: Path) -> None:
    """Raise OSError for anything but a plain file: a pipe would be waited for, without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a plain file")


def _tensors(
    raw: bytes, digest: str, data_bytes: int, shard: int, path: Path
) -> tuple[Tensor, ...]:
    """The tensors of a header."""
    start = _LENGTH_BYTES + len(raw)

    def parse() -> tuple[Tensor, ...]:
        return tuple(
            Tensor(t.name, t.dtype, t.shape, shard, start + t.begin, t.nbytes)
            for t in parse_header(raw, data_bytes=data_bytes, path=path)
        )

    return remembered(_parsed, (digest, data_bytes, shard), parse, kept=_SHARDS_KEPT)


def digest_header(raw: bytes) -> str:
    """Digest of a raw header, 32 hex digits."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def read_raw_header(descriptor: int, path: Path) -> bytes:
    """The raw JSON header of an open file.

    Raises:
        PreflightError: the announced length does not fit the file.
    """
    size = os.fstat(descriptor).st_size
    if size < _LENGTH_BYTES + 2:
        raise _truncated(path, f"{size} bytes are too few for a safetensors file")
    (length,) = struct.unpack("<Q", os.pread(descriptor, _LENGTH_BYTES, 0))
    if os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER:
        raise PreflightError(
            f"{path} is a Git LFS pointer, not the file it points to",
            hint="fetch the files: git lfs pull (or hf download)",
        )
    if length > MAX_HEADER_BYTES:
        raise PreflightError(
            f"{path} is not a safetensors file: its header would be {length} bytes long"
        )
    if length > size - _LENGTH_BYTES:
        raise _truncated(path, f"its header is {length} bytes, the file has {size}")
    raw = os.pread(descriptor, length, _LENGTH_BYTES)
    if len(raw) != length:
        raise _truncated(path, f"its header ends after {len(raw)} bytes")
    return raw


def _truncated(path: Path, reason: str) -> PreflightError:
    return PreflightError(
        f"{path} is truncated: {reason}",
        hint="push it once it is written: to another name first, and renamed when it is whole",
    )


def parse_header(raw: bytes, *, data_bytes: int, path: Path) -> list[Tensor]:
    """The tensors of a raw header in file order; `begin` is relative to the data section.

    Args:
        raw: the JSON header.
        data_bytes: size of the data section that follows it.
        path: named in errors.

    Raises:
        PreflightError: anything is wrong with it.
    """
    try:
        entries = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_checked_names, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise PreflightError(f"{path}: its header is not valid: {error}") from error
    if not isinstance(entries, dict):
        raise PreflightError(f"{path}: its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = [_parse_entry(name, entry, path) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            fault = "overlaps the tensor before it" if tensor.begin < end else "follows a hole"
            raise PreflightError(
                f"{path}: {tensor.name} {fault} (offset {tensor.begin}, not {end})"
            )
        end += tensor.nbytes
    if end > data_bytes:
        raise _truncated(
            path, f"its header announces {end} bytes of tensors, the file holds {data_bytes}"
        )
    if end < data_bytes:
        raise PreflightError(f"{path}: {data_bytes - end} bytes at its end belong to no tensor")
    return tensors


def _checked_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name!r} appears twice")
        name.encode()  # half of a surrogate pair is not text, and could not be put on record
        entries[name] = value
    return entries


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _parse_entry(name: str, entry: Any, path: Path) -> Tensor:
    """One header entry, checked against itself; `begin` is relative to the data section."""

    def refuse(reason: str) -> PreflightError:
        return PreflightError(f"{path}: {name!r} {reason}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"has the unknown dtype {str(dtype)[:40]!r}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise refuse("has no valid shape")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("has no valid data_offsets")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    begin, end = offsets
    if bits != (end - begin) * 8:
        raise refuse(
            f"of {dtype} {shape} takes {-(-bits // 8)} bytes, its data_offsets span {end - begin}"
        )
    return Tensor(name, dtype, tuple(shape), 0, begin, end - begin)


def _is_sizes(value: Any) -> bool:
    """Whether this is a list of sizes, each below 2**63 (a bool is an int to Python, not here)."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def torch_name(dtype: str, tensor: str) -> str:
    """The attribute of `torch` for a safetensors dtype; `tensor` is named in the error.

    Raises:
        PreflightError: torch has no such dtype (packed sub-byte types).
    """
    name = _DTYPES[dtype][1]
    if not name:
        raise PreflightError(
            f"{tensor} is stored as {dtype}, which cannot be pushed in chunks",
            hint="push it with --transport disk",
        )
    return name


def safetensors_name(dtype: str, tensor: str) -> str:
    """The safetensors name of a torch dtype (`bfloat16`); `tensor` is named in the error.

    Raises:
        PreflightError: safetensors has no such dtype.
    """
    for name, (_, torch_dtype) in _DTYPES.items():
        if torch_dtype == dtype:
            return name
    raise PreflightError(f"{tensor} is a tensor of {dtype}, which a checkpoint cannot hold")
