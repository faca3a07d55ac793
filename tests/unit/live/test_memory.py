"""What a rank offers out of its memory, and when that has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.live.blocks import Block
from skyctl.live.offer import GLOO, IPC, NCCL

torch = pytest.importorskip("torch")

from skyctl.live.memory import RankMemory  # noqa: E402


def pair(tensor: Any) -> Any:
    shape = tuple(tensor.shape)
    return Block("w", "bfloat16", shape, (0,) * len(shape), shape), tensor


def test_the_same_memory_of_another_dtype_is_described_anew() -> None:
    memory = RankMemory(GLOO)
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert memory.describe([pair(tensor)])["key"] == ""
    memory.key = "an offer"
    assert memory.describe([pair(tensor)]) == {"same": True, "key": "an offer", "group": ""}
    described = memory.describe([pair(tensor.view(torch.float16))])
    assert "same" not in described and described["key"] == ""


@pytest.mark.parametrize("transport", [IPC, GLOO, NCCL])
def test_tensors_of_several_devices_are_not_offered(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Kernels of one GPU would read another's memory, and its streams would not be waited for."""
    memory = RankMemory(transport)
    exported = SimpleNamespace(export=lambda tensors: ([], [(n, 0) for n in range(len(tensors))]))
    monkeypatch.setattr(memory, "_exporter", exported)
    here, there = torch.zeros(4), torch.zeros(4, device="meta")
    described = memory.describe([pair(here), pair(there), pair(here)])
    assert described == {"reason": "its tensors are on cpu and meta"}
