"""Output layers that use the embeddings' weight."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from skyctl.engines.vllm.inside.experts import repack_tied_layers, tied_layers  # noqa: E402


class Packing:
    """Like vLLM's quant_method on CPU: it makes the copy that a layer computes with."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, packed, bias)


def layer(weight: Any) -> Any:
    module = torch.nn.Module()
    module.weight = weight
    module.quant_method = Packing()
    module.quant_method.process_weights_after_loading(module)
    return module


def model(*, tied: bool) -> Any:
    module = torch.nn.Module()
    module.embed = layer(torch.nn.Parameter(torch.ones(4, 3), requires_grad=False))
    weight = module.embed.weight
    module.head = layer(weight if tied else torch.nn.Parameter(torch.ones(4, 3)))
    return module


def test_a_layer_is_tied_when_its_weight_is_an_earlier_one_s() -> None:
    assert [name for name, _ in tied_layers(model(tied=True))] == ["head"]
    assert not list(tied_layers(model(tied=False)))


def test_a_tied_layer_computes_with_what_was_loaded_for_the_embeddings() -> None:
    module = model(tied=True)
    module.embed.weight.copy_(torch.full((4, 3), 2.0))
    x = torch.ones(1, 3)
    assert module.head.cpu_linear(x, None, None).tolist() == [[3.0] * 4]  # still the old copy
    repack_tied_layers(module)
    assert module.head.cpu_linear(x, None, None).tolist() == [[6.0] * 4]
