"""Scan a checkpoint's bytes for NaN and infinity, without torch.

A float that is not finite has an exponent of all ones. For the wide types only the byte of each
element with the sign and most of the exponent is scanned: elements that do not match there need no
second look, and weights large enough to match are rare.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError

_READ_BYTES = 8 * 1024 * 1024  # both are multiples of every element's size
_LOOK_BYTES = 256 * 1024  # fits in the processor's cache


Buffer = bytes | mmap.mmap
"""Types that Python slices with a step at gigabytes per second; a memoryview is 10x slower."""


class NotFinite(PreflightError):
    """A checkpoint holds NaN or infinity; names the file, the tensor and the element."""

    def __init__(self, path: str, tensor: str, element: int) -> None:
        super().__init__(
            f"{path}: {tensor} holds NaN or infinity (element {element})",
            hint="push an earlier checkpoint, or --no-scan to push it all the same",
        )

    @property
    def kind(self) -> str:
        return PreflightError.__name__


@dataclass(frozen=True)
class _Form:
    """Where a type's exponent is: bytes per element, `values` of the highest byte whose exponent
    bits are all ones, and the bits of the byte below that must be ones too (0: none).
    """

    size: int
    values: bytes
    below: int = 0

    @property
    def high(self) -> re.Pattern[bytes]:
        return re.compile(b"[" + re.escape(self.values) + b"]")


_WIDE = b"\x7f\xff"
_FIVE_BITS = b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff"
_FORMS = {
    "F64": _Form(8, _WIDE, 0xF0),
    "F32": _Form(4, _WIDE, 0x80),
    "BF16": _Form(2, _WIDE, 0x80),
    "F16": _Form(2, _FIVE_BITS),
    "F8_E5M2": _Form(1, _FIVE_BITS),
    "F8_E4M3": _Form(1, _WIDE),  # has NaN, no infinity
    "F8_E8M0": _Form(1, b"\xff"),  # these have a single NaN
    "F8_E5M2FNUZ": _Form(1, b"\x80"),
    "F8_E4M3FNUZ": _Form(1, b"\x80"),
}


def may_be_not_finite(dtype: str) -> bool:
    """Whether the type (its safetensors name) has NaN or infinity that can be scanned for."""
    return dtype in _FORMS


def first_not_finite(data: Buffer, dtype: str, begin: int, nbytes: int) -> int | None:
    """The number of the first element that is not finite; None if all are. `nbytes` of `data` from
    `begin` are whole elements; types without NaN and infinity are skipped.
    """
    form = _FORMS.get(dtype)
    if form is None:
        return None
    end = begin + nbytes
    for at in range(begin, end, _LOOK_BYTES):
        place = _search(data, at, min(at + _LOOK_BYTES, end), form)
        if place is not None:
            return (at - begin) // form.size + place
    return None


def refuse_not_finite(checkpoint: Checkpoint) -> None:
    """Read every floating-point tensor and stop at the first that holds NaN or infinity.

    Integers and types without either are skipped. Reads the whole checkpoint once, 8 MiB at a time.

    Raises:
        NotFinite: names the file, the tensor and the element.
        PreflightError: a file could not be read.
    """
    for tensor in checkpoint.tensors:
        if may_be_not_finite(tensor.dtype):
            path = checkpoint.shards[tensor.shard].path
            try:
                with Path(path).open("rb") as file:
                    _refuse_in_file(file.fileno(), path, tensor)
            except OSError as error:
                raise PreflightError(f"{path} cannot be read: {error}") from error


def _refuse_in_file(descriptor: int, path: str, tensor: Tensor) -> None:
    for done in range(0, tensor.nbytes, _READ_BYTES):
        size = min(_READ_BYTES, tensor.nbytes - done)
        piece = os.pread(descriptor, size, tensor.begin + done)
        if len(piece) != size:
            raise PreflightError(f"{path} ends within {tensor.name}: it is being written")
        element = first_not_finite(piece, tensor.dtype, 0, size)
        if element is not None:
            raise NotFinite(path, tensor.name, done // _FORMS[tensor.dtype].size + element)


def _search(data: Buffer, begin: int, end: int, form: _Form) -> int | None:
    high = data[begin + form.size - 1 : end : form.size]
    if not any(value in high for value in form.values):  # far cheaper than the pattern
        return None
    for match in form.high.finditer(high):
        element = match.start()
        below = data[begin + element * form.size + form.size - 2] if form.below else 0
        if below & form.below == form.below:
            return element
    return None
