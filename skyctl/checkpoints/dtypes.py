"""Element types by their safetensors name, without importing torch."""

from __future__ import annotations

from skyctl.errors import PreflightError

DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}
"""Bits per element of every dtype a safetensors header may name."""

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}


def torch_name(dtype: str, tensor: str) -> str:
    """The attribute of `torch` for a safetensors dtype; `tensor` is named in the error.

    Raises:
        PreflightError: torch has no such dtype (packed sub-byte types).
    """
    try:
        return _TORCH_NAMES[dtype]
    except KeyError:
        raise PreflightError(
            f"{tensor} is stored as {dtype}, which cannot be pushed in chunks",
            hint="push it with --transport disk",
        ) from None


def safetensors_name(dtype: str, tensor: str) -> str:
    """The safetensors name of a torch dtype (`bfloat16`); `tensor` is named in the error.

    Raises:
        PreflightError: safetensors has no such dtype.
    """
    for name, torch_dtype in _TORCH_NAMES.items():
        if torch_dtype == dtype:
            return name
    raise PreflightError(f"{tensor} is a tensor of {dtype}, which a checkpoint cannot hold")
