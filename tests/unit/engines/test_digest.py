"""The digest of a model: equal for equal weights, different after the smallest change."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from skyctl.engines.vllm.inside.digest import digest_model  # noqa: E402


class Packed(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A linear layer as vLLM leaves it on CPU: the weight is empty, a kernel holds the real one."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.input_size_per_partition = weight.shape[1]
        self.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, weight, bias)


def model(width: int = 96, seed: int = 1, dtype: Any = None) -> tuple[Any, Any]:
    """A model with one packed and one plain layer, and the packed layer's weight."""
    torch.manual_seed(seed)
    weight = torch.randn(32, width, dtype=dtype or torch.float32)
    module = torch.nn.Module()
    module.packed = Packed(weight)
    module.norm = torch.nn.LayerNorm(8)
    return module, weight


def test_equal_weights_have_equal_digests() -> None:
    first, second = digest_model(model()[0]), digest_model(model()[0])
    assert first == second
    assert first["probed"] == 1
    assert first["tensors"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_ulp_in_a_packed_weight_changes_the_digest(dtype: Any) -> None:
    module, weight = model(dtype=dtype)
    before = digest_model(module)["digest"]
    weight[3, 70] = torch.nextafter(weight[3, 70], torch.tensor(9.0, dtype=dtype))
    assert digest_model(module)["digest"] != before


def test_one_ulp_in_a_plain_parameter_changes_the_digest() -> None:
    module, _ = model()
    before = digest_model(module)["digest"]
    with torch.no_grad():
        module.norm.bias[2] = torch.nextafter(torch.tensor(0.0), torch.tensor(1.0))
    assert digest_model(module)["digest"] != before


def test_in_a_wide_layer_every_weight_counts_and_exchanged_columns_too() -> None:
    module, weight = model(width=700)
    seen = {digest_model(module)["digest"]}
    for column in (0, 63, 64, 699):
        weight[5, column] += 0.01
        seen.add(digest_model(module)["digest"])
    weight[:, [1, 65]] = weight[:, [65, 1]]
    seen.add(digest_model(module)["digest"])
    assert len(seen) == 6


def test_an_output_layer_counts_by_what_it_computes_with() -> None:
    module, weight = model()
    module.lm_head = Packed(weight.clone())
    module.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.lm_head.tie_weights = None
    packed = weight.clone()
    module.lm_head.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, packed, bias)
    before = digest_model(module)["digest"]
    packed[3, 70] += 1  # the parameter stays: a stale copy, or a fresh one
    assert digest_model(module)["digest"] != before
