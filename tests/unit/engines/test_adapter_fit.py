"""Which modules of an adapter vLLM's own manager of wrapped layers has a place for."""

from __future__ import annotations

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside.adapter_fit import unapplied, unread

pytestmark = pytest.mark.usefixtures("vllm")

ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.1.mlp.experts"


def model(*, fused_experts: bool = False) -> Any:
    """As vLLM wraps a model for `--lora-target-modules q_proj experts`."""
    names = [f"{ATTENTION}.qkv_proj", EXPERTS, "lm_head"]
    packed = {names[0]: [f"{ATTENTION}.{part}_proj" for part in "qkv"]}
    if not fused_experts:
        packed[EXPERTS] = [f"{EXPERTS}.{number}.up_proj" for number in range(2)]
    manager = SimpleNamespace(
        modules=dict.fromkeys(names), packed_modules=packed, _is_3d_moe_model=fused_experts
    )
    return SimpleNamespace(lora_manager=manager)


def left_out(of: Any, *modules: str) -> list[str]:
    names = [f"base_model.model.{module}.lora_A.weight" for module in modules]
    found = unapplied(of, names)
    return [module for module, name in zip(modules, names, strict=True) if name in found]


def test_parts_of_a_wrapped_layer_have_a_place_and_others_have_none() -> None:
    taken = [f"{ATTENTION}.q_proj", f"{ATTENTION}.v_proj", f"{EXPERTS}.1.up_proj", "lm_head"]
    missing = ["model.layers.0.mlp.down_proj", f"{ATTENTION}.qkv_proj", EXPERTS]
    assert left_out(model(), *taken, *missing) == missing


def test_fused_experts_have_a_place_where_the_model_has_them_so() -> None:
    assert left_out(model(fused_experts=True), EXPERTS, f"{EXPERTS}.base_layer") == []


def test_a_server_without_adapters_leaves_it_to_the_load() -> None:
    assert unapplied(SimpleNamespace(), ["x.lora_A.weight"]) == []


def test_scales_that_this_vllm_does_not_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"use_rslora": True, "rank_pattern": {}, "alpha_pattern": {"q_proj": 32}, "r": 8}
    assert unread(config) == []
    from vllm.lora import peft_helper

    earlier = make_dataclass("PEFTHelper", ["r", "lora_alpha", "use_rslora"])  # vLLM 0.26
    monkeypatch.setattr(peft_helper, "PEFTHelper", earlier)
    assert unread(config) == ["alpha_pattern"]
