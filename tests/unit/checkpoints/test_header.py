"""Safetensors headers: what is accepted, and that nothing malformed gets through or crashes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyctl.checkpoints.header import parse_header, read_header
from skyctl.errors import NotFoundError, PreflightError
from tests.unit.push.checkpoints import filled, safetensors

PATH = Path("model.safetensors")


def parse(header: Any, data_bytes: int = 8) -> Any:
    return parse_header(json.dumps(header).encode(), data_bytes=data_bytes, path=PATH)


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_tensors_come_in_file_order_with_offsets_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = safetensors(
        {"b": filled([2, 3], 1), "a": filled([4], 2, "BF16"), "s": ("F32", [], b"1234")}
    )
    path.write_bytes(content)
    shard, tensors = read_header(path, 3)
    assert [(t.name, t.dtype, t.shape, t.nbytes, t.shard) for t in tensors] == [
        ("b", "F32", (2, 3), 24, 3),
        ("a", "BF16", (4,), 8, 3),
        ("s", "F32", (), 4, 3),
    ]
    assert content[tensors[1].begin : tensors[1].begin + 8] == filled([4], 2, "BF16")[2]
    assert shard.identity.size == len(content)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_header(tmp_path / "model.safetensors")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(PreflightError):
        read_header(tmp_path / "a")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "not a JSON object"),
        ({"w\ud800": entry()}, "header is not valid"),
        ({"w": 3}, "'w' has no dtype"),
        ({"w": {**entry(), "extra": 1}}, "'w' has no dtype"),
        ({"w": entry(dtype="F31")}, "unknown dtype 'F31'"),
        ({"w": entry(dtype=["F32"])}, "unknown dtype"),
        ({"w": entry(shape=[-2])}, "no valid shape"),
        ({"w": entry(shape=[2.0])}, "no valid shape"),
        ({"w": entry(shape=[True, 2])}, "no valid shape"),
        ({"w": entry(shape=[2**63])}, "no valid shape"),
        ({"w": entry(shape=[1] * 65)}, "no valid shape"),
        ({"w": entry(shape=[2**62] * 40)}, "takes"),
        ({"w": entry(8, 0)}, "no valid data_offsets"),
        ({"w": entry(shape=[3])}, "takes 12 bytes, its data_offsets span 8"),
        ({"w": entry(0, 8), "v": entry(4, 12)}, "v overlaps"),
        ({"w": entry(0, 8), "v": entry(12, 20)}, "v follows a hole"),
        ({"w": entry(4, 12)}, "follows a hole"),
        ({"w": entry(0, 8), "v": entry(8, 16)}, "truncated: its header announces 16 bytes"),
        ({"w": entry(0, 4, [1])}, "4 bytes at its end belong to no tensor"),
    ],
)
def test_a_malformed_header_is_refused_naming_the_file(header: Any, words: str) -> None:
    with pytest.raises(PreflightError, match=r"model\.safetensors") as caught:
        parse(header)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "raw",
    [
        b'{"w": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, '
        b'"w": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"w": {"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"w": NaN}',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"w": {"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}',
        b"",
    ],
)
def test_bad_json_is_refused(raw: bytes) -> None:
    with pytest.raises(PreflightError):
        parse_header(raw, data_bytes=8, path=PATH)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * length)
    with pytest.raises(PreflightError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 50)
    with pytest.raises(PreflightError):
        read_header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = safetensors({"a": filled([4], 1), "b": filled([4], 2)})
    path = tmp_path / "model.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(PreflightError):
            read_header(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
SIZES = st.lists(st.integers(-2, 20) | st.just(2**63 - 1) | JSON, max_size=4)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "X"]),
        "shape": SIZES,
        "data_offsets": SIZES,
    }
)


def refused_or_sound(raw: bytes, data_bytes: int) -> None:
    """Either an error of ours, or tensors that exactly tile the data."""
    try:
        tensors = parse_header(raw, data_bytes=data_bytes, path=PATH)
    except PreflightError:
        return
    assert sum(tensor.nbytes for tensor in tensors) == data_bytes
    end = 0
    for tensor in tensors:
        assert tensor.begin == end
        end += tensor.nbytes


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.text(max_size=4), ENTRIES | JSON, max_size=4), st.integers(0, 40))
def test_no_structure_crashes_the_parser(header: Any, data_bytes: int) -> None:
    refused_or_sound(json.dumps(header).encode(), data_bytes)


VALID = safetensors(
    {"a": filled([4], 1), "b": filled([2, 2], 2, "BF16"), "c": filled([3], 3, "U8")}
)
HEADER_END = 8 + struct.unpack("<Q", VALID[:8])[0]


def test_no_flipped_byte_crashes_the_parser() -> None:
    random = Random(7)
    for _ in range(5000):
        content = bytearray(VALID)
        for _ in range(random.randint(1, 4)):
            content[random.randrange(8, HEADER_END)] = random.randrange(256)
        refused_or_sound(bytes(content[8:HEADER_END]), len(VALID) - HEADER_END)
