"""Element types by their safetensors name, without importing torch."""

from __future__ import annotations

from skyctl.errors import PreflightError

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
