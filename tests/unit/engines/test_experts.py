"""Experts on CPU are packed after every update, whatever this vLLM does itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from skyctl.engines.vllm.inside.experts import complete_packing, update_problem  # noqa: E402


class Experts:
    """Like vLLM's CPU experts: packing negates, so that packing twice is seen."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.w13_weight = torch.nn.Parameter(-layer.w13_weight, requires_grad=False)


def method_class(*, packs_itself: bool = False, new_kernel: bool = False) -> Any:
    """Like vLLM's method: it packs when it makes the kernel; a better version would always."""

    class Method:
        def __init__(self) -> None:
            self.moe_kernel: Any = None

        def process_weights_after_loading(self, layer: Any) -> None:
            first = self.moe_kernel is None
            if first or new_kernel:
                self.moe_kernel = SimpleNamespace(fused_experts=Experts())
            if first or packs_itself:
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return Method


def load(layer: Any, value: float) -> Any:
    layer.w13_weight = torch.nn.Parameter(torch.full((2, 4, 4), value), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.w13_weight[0, 0, 0].item()


def moe_layer(method: Any) -> Any:
    layer = torch.nn.Module()
    layer.quant_method = method()
    return layer


@pytest.mark.parametrize("packs_itself", [False, True])
def test_what_is_loaded_is_packed_once_at_the_start_and_in_every_update(packs_itself: bool) -> None:
    method = method_class(packs_itself=packs_itself)
    complete_packing(method)
    complete_packing(method)
    layer = moe_layer(method)
    assert [load(layer, value) for value in (1.0, 2.0, 3.0)] == [-1.0, -2.0, -3.0]


def test_weights_that_came_packed_with_a_new_kernel_are_left_alone() -> None:
    method = method_class(new_kernel=True)
    complete_packing(method)
    layer = moe_layer(method)
    load(layer, 1.0)
    assert load(layer, 2.0) == 2.0


def test_a_packing_that_fails_leaves_the_next_update_as_it_was() -> None:
    method = method_class(packs_itself=True)
    complete_packing(method)
    layer = moe_layer(method)
    load(layer, 1.0)
    layer.w13_weight = None
    with pytest.raises(TypeError):
        layer.quant_method.process_weights_after_loading(layer)
    assert load(layer, 2.0) == -2.0


def model_of(layer: Any) -> Any:
    model = torch.nn.Module()
    model.mlp = layer
    return model


def test_a_model_whose_experts_stay_unpacked_must_not_be_updated() -> None:
    layer = moe_layer(method_class())
    load(layer, 1.0)
    assert update_problem(model_of(layer)).startswith("mlp: an update would leave its experts")
    complete_packing(type(layer.quant_method))
    assert update_problem(model_of(layer)) == ""
    layer.quant_method.moe_kernel = SimpleNamespace()
    assert "in a way that skyctl does not know" in update_problem(model_of(layer))


def test_models_without_experts_and_experts_on_devices_have_no_problem() -> None:
    layer = moe_layer(method_class())
    assert update_problem(model_of(layer)) == ""
    layer.w13_weight = torch.nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
    assert update_problem(model_of(layer)) == ""


def test_layers_that_take_adapters_must_look_into_what_they_wrap() -> None:
    class Wraps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(1, 1)

    class Looks(Wraps):
        def load_weights(self, weights: Any) -> None: ...

    assert update_problem(model_of(Wraps())).startswith("mlp: this vLLM loads no weights into")
    assert update_problem(model_of(Looks())) == ""
