"""Receivers: bytes arrive, and what is not the sender's is not read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from skyctl.engines.vllm.inside.receivers import open_receiver
from skyctl.transfer.transports.shm import ShmCarrier
from skyctl.wire.messages import ChunkUpdate, ReceiverInit

SESSION = "ab12ab12"


def carrier(session: str = SESSION, slot_bytes: int = 256) -> tuple[ShmCarrier, memoryview]:
    made = ShmCarrier(session)
    (slot,) = made.allocate(1, slot_bytes)
    return made, slot


def init(endpoint: dict[str, Any], slot_bytes: int = 256) -> ReceiverInit:
    return ReceiverInit("shm", SESSION, ["w"], slot_bytes, endpoint)


def update(nbytes: int, offset: int = 0) -> ChunkUpdate:
    return ChunkUpdate(0, 0, 256, ["w"], ["uint8"], [[nbytes]], [offset], [0])


def test_a_tensor_is_read_into_memory_of_its_own() -> None:
    sender, slot = carrier()
    slot[64:68] = b"abcd"
    receiver = open_receiver(init(sender.endpoint()), 0)
    ((name, tensor),) = receiver.receive(update(4, 64))
    slot[64:68] = b"----"
    assert (name, bytes(tensor.tolist())) == ("w", b"abcd")


def test_memory_of_another_session_is_not_read() -> None:
    sender, _ = carrier(session="ffffffff")
    with pytest.raises(RuntimeError, match="not this push's memory"):
        open_receiver(init(sender.endpoint()), 0)


def test_memory_of_another_size_is_not_read() -> None:
    sender, _ = carrier(slot_bytes=128)
    with pytest.raises(RuntimeError, match="128 bytes"):
        open_receiver(init(sender.endpoint()), 0)


def test_memory_that_may_change_its_size_is_not_read() -> None:
    descriptor = os.memfd_create(f"skyctl-{SESSION}-0", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 256)
        with pytest.raises(RuntimeError, match="not sealed"):
            open_receiver(init({"pid": os.getpid(), "fds": [descriptor]}), 0)
    finally:
        os.close(descriptor)


def test_a_plain_file_is_not_read(tmp_path: Path) -> None:
    file = (tmp_path / f"memfd:skyctl-{SESSION}-0").open("wb")
    with file, pytest.raises(RuntimeError, match="not this push's memory"):
        open_receiver(init({"pid": os.getpid(), "fds": [file.fileno()]}), 0)


def test_a_sender_that_is_gone_is_named() -> None:
    sender, _ = carrier()
    receiver = open_receiver(init(sender.endpoint()), 0)
    sender.close()
    with pytest.raises(RuntimeError, match="cannot be opened"):
        receiver.receive(update(4))


def test_reading_past_the_end_is_an_error() -> None:
    sender, _ = carrier()
    receiver = open_receiver(init(sender.endpoint()), 0)
    with pytest.raises(RuntimeError, match="ends at"):
        receiver.receive(update(64, offset=224))


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="it has shm, gloo"):
        open_receiver(ReceiverInit("carrier_pigeon", SESSION, [], 1), 0)
