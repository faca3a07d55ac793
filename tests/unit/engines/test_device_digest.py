"""The digest that is computed where tensors lie, here on the CPU."""

from __future__ import annotations

import torch

from skyctl.engines.vllm.inside import device_digest
from skyctl.engines.vllm.inside.device_digest import digest_on_device


def test_equal_bytes_give_equal_numbers_and_any_changed_element_another() -> None:
    tensor = torch.randn(37, 129, dtype=torch.bfloat16)
    before = digest_on_device([tensor])
    assert digest_on_device([tensor.clone()]) == before
    for place in ((0, 0), (36, 128), (17, 5)):
        changed = tensor.clone()
        changed.view(torch.int16)[place] ^= 1  # one bit
        assert digest_on_device([changed]) != before


def test_exchanged_elements_and_blocks_change_the_number(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(device_digest, "BLOCK_WORDS", 16)
    tensor = torch.arange(64, dtype=torch.int64)
    swapped = tensor.clone()
    swapped[[3, 40]] = swapped[[40, 3]]
    blocks = torch.cat([tensor[16:32], tensor[:16], tensor[32:]])
    assert len({digest_on_device([t])[0] for t in (tensor, swapped, blocks)}) == 3


def test_odd_sizes_and_unaligned_views_are_covered_to_the_last_byte() -> None:
    base = torch.arange(0, 103, dtype=torch.uint8)
    view = base[1:]
    before = digest_on_device([view])
    assert digest_on_device([view.clone()]) == before
    changed = view.clone()
    changed[-1] += 1
    assert digest_on_device([changed]) != before


def test_each_of_several_tensors_gets_its_own_number() -> None:
    one, other = torch.ones(8), torch.zeros(8)
    assert digest_on_device([one, other]) == digest_on_device([one]) + digest_on_device([other])
    assert digest_on_device([]) == []
