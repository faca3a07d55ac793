"""What travels between a push and the engine is checked where it arrives."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.wire.messages import (
    ChunkUpdate,
    ReceiverInit,
    RowQuestion,
    row_number,
)

INIT: dict[str, Any] = {
    "transport": "shm",
    "session": "ab12ab12",
    "tensors": ["w"],
    "slot_bytes": 64,
}
UPDATE: dict[str, Any] = {
    "chunk": 0,
    "slot": 0,
    "size": 8,
    "names": ["w"],
    "dtype_names": ["float32"],
    "shapes": [[2]],
    "offsets": [0],
    "crc32": [0],
}


def test_well_formed_messages_pass() -> None:
    assert ReceiverInit(**INIT).endpoint == {}
    assert ChunkUpdate(**UPDATE).names == ["w"]


@pytest.mark.parametrize(
    "change",
    [
        {"transport": "../shm"},
        {"transport": 3},
        {"session": "short"},
        {"session": "../../../../etc"},
        {"slot_bytes": 0},
        {"slot_bytes": "64"},
    ],
)
def test_a_bad_init_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ReceiverInit(**{**INIT, **change})


@pytest.mark.parametrize("key", ["names", "dtype_names", "shapes", "offsets", "crc32"])
def test_columns_of_different_length_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ChunkUpdate(**{**UPDATE, key: []})


QUESTION: dict[str, Any] = {
    "name": "w",
    "dtype": "bfloat16",
    "shape": [4, 2, 50],
    "rows": [0, 3],
    "begin": 36,
    "end": 100,
}


def test_a_question_sees_a_tensor_as_a_matrix() -> None:
    assert RowQuestion(**QUESTION).matrix == (4, 100)
    assert RowQuestion(**{**QUESTION, "shape": [100], "rows": [0]}).matrix == (1, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [4]},
        {"rows": [-1]},
        {"shape": [100]},
        {"end": 101, "begin": 90},
        {"begin": 35},
        {"begin": 100},
        {"begin": -1, "end": 5},
    ],
)
def test_a_question_about_what_is_not_there_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="w has"):
        RowQuestion(**{**QUESTION, **change})


@pytest.mark.parametrize(
    ("dtype", "values", "same"),
    [
        ("float32", "00000080", "00000000"),  # -0
        ("float32", "ffff7f80", "00000000"),  # subnormal
        ("bfloat16", "0080", "0000"),
        ("bfloat16", "7f00", "0000"),
        ("float16", "0080", "0000"),
    ],
)
def test_what_a_multiplication_may_lose_does_not_count(dtype: str, values: str, same: str) -> None:
    assert row_number(bytes.fromhex(values), dtype) == row_number(bytes.fromhex(same), dtype)


@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        ("float32", "0000803f", "0100803f"),
        ("bfloat16", "803f", "813f"),
        ("bfloat16", "803f", "80bf"),
        ("float16", "0100", "0000"),  # a subnormal of float16 is a normal number to a processor
        ("int8", "80", "00"),
    ],
)
def test_every_other_bit_counts(dtype: str, first: str, second: str) -> None:
    assert row_number(bytes.fromhex(first), dtype) != row_number(bytes.fromhex(second), dtype)
