"""Our protobuf messages against those of the SDK, and the limits of packed bodies."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.tinker import wire

pytest.importorskip("tinker")
zstandard = pytest.importorskip("zstandard")

from tinker.proto import tinker_public_pb2 as published  # noqa: E402

# types that are written alike: int32, int64, uint32 and enums are one varint
_ALIKE = {3: "varint", 5: "varint", 13: "varint", 14: "varint"}


def described(descriptor: Any) -> dict[int, tuple[Any, ...]]:
    """number → name, how it is written, repeated, and of which message."""
    fields = {}
    for field in descriptor.fields:
        message = field.message_type
        inner: Any = message and message.name
        if message is not None and message.GetOptions().map_entry:
            inner = {n: kind[:2] for n, kind in described(message).items()}
        kind = _ALIKE.get(field.type, field.type)
        fields[field.number] = (field.name, kind, field.is_repeated, str(inner))
    return fields


@pytest.mark.parametrize("name", sorted(wire._MESSAGES))
def test_every_field_is_the_sdks(name: str) -> None:
    ours = described(wire.message(name).DESCRIPTOR)
    theirs = described(getattr(published, name).DESCRIPTOR)
    assert ours == {number: field for number, field in theirs.items() if number in ours}


def test_a_small_body_may_not_unpack_without_limit() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(wire.TooLarge, match="more than 1000 bytes"):
        wire.unpack_zstd(bomb, 1000)
    assert wire.unpack_zstd(zstandard.ZstdCompressor().compress(b"a" * 1000), 1000) == b"a" * 1000
    with pytest.raises(ValueError, match="not zstd"):
        wire.unpack_zstd(b"nothing of the kind", 1000)
