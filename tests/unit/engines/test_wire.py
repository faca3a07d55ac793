"""What travels between a push and the engine is checked where it arrives."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.engines.vllm.inside.wire import ChunkUpdate, ReceiverInit

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
