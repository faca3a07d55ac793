"""The largest number of each dtype, and what is not finite."""

from __future__ import annotations

import struct

LARGEST = {
    "F64": struct.pack("<Q", 0x7FEFFFFFFFFFFFFF),
    "F32": struct.pack("<I", 0x7F7FFFFF),
    "BF16": struct.pack("<H", 0xFF7F),
    "F16": struct.pack("<H", 0x7BFF),
    "F8_E5M2": b"\x7b",
    "F8_E4M3": b"\xfe",
    "F8_E8M0": b"\xfe",
    "F8_E5M2FNUZ": b"\xff",
    "F8_E4M3FNUZ": b"\x7f",
}
NAN = {
    "F64": struct.pack("<Q", 0x7FF8000000000000),
    "F32": struct.pack("<I", 0x7FC00000),
    "BF16": struct.pack("<H", 0xFFC0),
    "F16": struct.pack("<H", 0xFE00),
    "F8_E5M2": b"\x7e",
    "F8_E4M3": b"\xff",
    "F8_E8M0": b"\xff",
    "F8_E5M2FNUZ": b"\x80",
    "F8_E4M3FNUZ": b"\x80",
}
INFINITY = {
    "F64": struct.pack("<Q", 0x7FF0000000000000),
    "F32": struct.pack("<I", 0xFF800000),
    "BF16": struct.pack("<H", 0x7F80),
    "F16": struct.pack("<H", 0xFC00),
    "F8_E5M2": b"\x7c",
}
BAD = [(dtype, data) for forms in (NAN, INFINITY) for dtype, data in forms.items()]
