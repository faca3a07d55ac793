"""What a rank sends in steps arrives as it is, whatever the number of ranks that send."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from skyctl.wire.batches import batches
from skyctl.wire.layouts import Copy


@pytest.mark.parametrize("senders", [1, 3, 5, 24, 1000])
def test_a_run_that_is_cast_is_cut_between_elements(senders: int) -> None:
    export = torch.arange(100, dtype=torch.bfloat16)
    whole, target = Copy(0, 0, 1, 400, 0, 400, 0, 400), torch.zeros(100)
    for batch in batches([whole], senders, step_bytes=128):
        messages = batch.sent([export], [torch.float32])
        batch.unpack(messages, {0: target.view(torch.uint8)})
    assert torch.equal(target, export.float())
