"""NaN and infinity in a checkpoint, by type."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from skyctl.checkpoints import finite
from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.finite import refuse_not_finite
from skyctl.errors import PreflightError
from skyctl.push.transaction import PushRequest, push
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.push.fleets import Recorder, Stubs

LARGEST = {
    "F64": struct.pack("<Q", 0x7FEFFFFFFFFFFFFF),
    "F32": struct.pack("<I", 0x7F7FFFFF),
    "BF16": struct.pack("<H", 0xFF7F),
    "F16": struct.pack("<H", 0x7BFF),
    "F8_E5M2": b"\x7b",
    "F8_E4M3": b"\xfe",
}
NAN = {
    "F64": struct.pack("<Q", 0x7FF8000000000000),
    "F32": struct.pack("<I", 0x7FC00000),
    "BF16": struct.pack("<H", 0xFFC0),
    "F16": struct.pack("<H", 0xFE00),
    "F8_E5M2": b"\x7e",
    "F8_E4M3": b"\xff",
}
INFINITY = {
    "F64": struct.pack("<Q", 0x7FF0000000000000),
    "F32": struct.pack("<I", 0xFF800000),
    "BF16": struct.pack("<H", 0x7F80),
    "F16": struct.pack("<H", 0xFC00),
    "F8_E5M2": b"\x7c",
}
BAD = [(dtype, data) for forms in (NAN, INFINITY) for dtype, data in forms.items()]


def scan(tmp_path: Path, dtype: str, *elements: bytes) -> None:
    tensor = (dtype, [len(elements)], b"".join(elements))
    refuse_not_finite(read_checkpoint(str(write_checkpoint(tmp_path / "c", {"w": tensor}))))


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_number_of_a_type_is_finite(tmp_path: Path, dtype: str) -> None:
    scan(tmp_path, dtype, *[LARGEST[dtype]] * 5)


@pytest.mark.parametrize(("dtype", "bad"), BAD)
def test_file_tensor_and_element_are_named(tmp_path: Path, dtype: str, bad: bytes) -> None:
    good = LARGEST[dtype]
    with pytest.raises(PreflightError, match=r"safetensors: w holds NaN .*element 3\)"):
        scan(tmp_path, dtype, good, good, good, bad, good)


def test_an_element_beyond_the_first_piece_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "_PIECE_BYTES", 16)
    with pytest.raises(PreflightError, match="element 9"):
        scan(tmp_path, "F32", *[LARGEST["F32"]] * 9, NAN["F32"])


def test_integers_of_the_same_bits_are_passed_over(tmp_path: Path) -> None:
    scan(tmp_path, "I32", NAN["F32"])


@pytest.mark.parametrize("asked", [True, False])
async def test_a_push_looks_for_nan_only_when_asked(tmp_path: Path, asked: bool) -> None:
    stubs = Stubs(tmp_path)
    tensors = {**tiny_tensors(), "model.norm.weight": ("F32", [8], NAN["F32"] * 8)}
    bad = write_checkpoint(tmp_path / "bad", tensors)
    request = PushRequest(str(bad), scan_nan=asked)
    async with stubs.client() as client:
        if asked:
            with pytest.raises(PreflightError, match=r"model\.norm\.weight holds NaN"):
                await push(request, stubs.fleet, client=client, observer=Recorder())
            assert all("pause keep" not in engine.log for engine in stubs.engines)
        else:
            await push(request, stubs.fleet, client=client, observer=Recorder())
