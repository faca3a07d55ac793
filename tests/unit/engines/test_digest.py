"""The digest of a model: equal for equal weights, different after the smallest change."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from skyctl.engines.vllm.inside.digest import (  # noqa: E402
    _MULTIPLIERS,
    _SPAN,
    _factors,
    _finite,
    digest_model,
)
from tests.unit.engines.digest_cases import Kernel, Packed  # noqa: E402


def model(width: int = 96, seed: int = 1, dtype: Any = None) -> tuple[Any, Any]:
    """A model with one packed and one plain layer, and the packed layer's weight."""
    torch.manual_seed(seed)
    weight = torch.randn(32, width, dtype=dtype or torch.float32)
    module = torch.nn.Module()
    module.packed = Packed(weight)
    module.norm = torch.nn.LayerNorm(8)
    return module, weight


def not_finite(module: Any) -> str:
    return str(digest_model(module, finite=True)["not_finite"])


def test_equal_weights_have_equal_digests() -> None:
    first, second = digest_model(model()[0]), digest_model(model()[0])
    assert first == second
    assert first["probed"] == 1
    assert first["tensors"] == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("width", [96, 2048])
def test_a_parameter_that_is_not_finite_is_named(value: float, width: int) -> None:
    module, weight = model(width)
    module.scale = torch.nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
    module.places = torch.nn.Parameter(torch.arange(8), requires_grad=False)
    assert not_finite(module) == ""
    weight[3, 70] = value
    assert not_finite(module) == "packed"
    weight[3, 70] = 0
    module.norm.bias.data[2] = value
    assert not_finite(module) == "norm.bias"
    module.norm.bias.data[2] = 0
    module.scale.view(torch.uint8)[5] = 0x7F
    assert not_finite(module) == "scale"


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float8_e5m2, 0x7C),
        (torch.float8_e4m3fn, 0xFF),
        (torch.float8_e8m0fnu, 0xFF),
        (torch.float8_e5m2fnuz, 0x80),
        (torch.float8_e4m3fnuz, 0x80),
    ],
)
def test_every_type_of_8_bits_is_looked_at_for_what_is_not_finite(dtype: Any, bits: int) -> None:
    module, _ = model()
    module.scale = torch.nn.Parameter(torch.ones(8).to(dtype), requires_grad=False)
    assert not_finite(module) == ""
    module.scale.view(torch.uint8)[5] = bits
    assert not_finite(module) == "scale"


def test_what_the_sums_have_shown_of_a_parameter_is_not_looked_for_again() -> None:
    ones, broken = (torch.nn.Parameter(torch.full((8,), x)) for x in (1.0, float("nan")))
    named = [("a", ones), ("b", broken), ("c", ones.detach()), ("d", torch.nn.Parameter(ones + 1))]
    examined = {id(ones): (1, False), id(broken): (2, True), id(named[3][1]): (3, None)}
    assert _finite(named, examined) == {"a": False, "b": True, "d": True}
    assert _finite(named, {}) == {"a": True, "b": False, "d": True}


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


def test_a_scale_that_is_a_view_of_one_value_has_the_digest_of_that_value() -> None:
    """So vLLM's kernels for FP8 on CPUs with AMX keep it: shape (1, 1), stride (0, 0)."""
    found = []
    for scale in (torch.tensor(0.5).expand(1, 1), torch.tensor([[0.5]])):
        module, _ = model()
        module.scale = torch.nn.Parameter(scale, requires_grad=False)
        found.append(digest_model(module)["digest"])
    assert found[0] == found[1] != digest_model(model()[0])["digest"]


def two_percent(weight: Any) -> None:
    weight[5, 1030] *= 1.02


def swapped_weights(weight: Any) -> None:
    weight[7, [1, 65]] = weight[7, [65, 1]]


def swapped_columns(weight: Any) -> None:
    weight[:, [3, 1091]] = weight[:, [1091, 3]]


def swapped_blocks(weight: Any) -> None:
    weight[:, :128] = weight[:, [*range(64, 128), *range(64)]]


def reversed_heads(weight: Any) -> None:
    weight[:] = weight.view(32, -1, 64).flip(1).reshape(32, -1)


def last_column(weight: Any) -> None:
    weight[31, -1] += 0.01


CHANGES = (
    two_percent,
    swapped_weights,
    swapped_columns,
    swapped_blocks,
    reversed_heads,
    last_column,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_in_a_wide_layer_changes_the_digest(change: Any, dtype: Any) -> None:
    module, weight = model(width=1152, dtype=dtype)
    before = digest_model(module)["digest"]
    change(weight)
    assert digest_model(module)["digest"] != before


def test_most_single_weights_of_a_wide_layer_can_not_change_by_2_percent_unseen() -> None:
    module, weight = model(width=1152, dtype=torch.bfloat16)
    before = digest_model(module)["digest"]
    generator = torch.Generator().manual_seed(3)
    unseen = 0
    for _ in range(50):
        row = int(torch.randint(32, (), generator=generator))
        column = int(torch.randint(1152, (), generator=generator))
        kept = weight[row, column].clone()
        weight[row, column] *= 1.02
        unseen += digest_model(module)["digest"] == before
        weight[row, column] = kept
    assert unseen <= 1  # those that are small beside their neighbours


def test_factors_of_a_span_differ_and_are_exact() -> None:
    for multiplier in _MULTIPLIERS:
        factors = _factors(_SPAN, multiplier)
        assert len(set(factors.tolist())) == _SPAN
        assert factors.to(torch.bfloat16).tolist() == factors.tolist()


def test_a_packed_tensor_that_a_kernel_keeps_is_hashed_itself() -> None:
    module, weight = model()
    packed = weight.clone()
    module.packed.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, packed, bias)
    before = digest_model(module)["digest"]
    packed[0, 0] = -packed[0, 0]
    assert digest_model(module)["digest"] != before


def test_an_output_layer_counts_by_what_it_computes_with() -> None:
    module, weight = model()
    module.lm_head = Packed(weight.clone())
    module.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.lm_head.tie_weights = None
    packed = weight.clone()
    module.lm_head.cpu_linear = Kernel(packed)
    before = digest_model(module)["digest"]
    packed[3, 70] += 1  # the parameter stays: a stale copy, or a fresh one
    assert digest_model(module)["digest"] != before


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("asleep", "refused"), [("weights", True), ("kv_cache", False)])
def test_weights_that_sleep_are_not_read(
    monkeypatch: pytest.MonkeyPatch, asleep: str, refused: bool
) -> None:
    """Their memory is unmapped: a worker that touched it would end."""
    from vllm.device_allocator import cumem

    from skyctl.engines.vllm.inside.worker import require_mapped

    parts = [cumem.AllocationData((0, 1, 2, 3), tag) for tag in ("weights", "kv_cache")]
    allocator = SimpleNamespace(pointer_to_data=dict(enumerate(parts)))
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    require_mapped()
    for part in parts:
        part.is_asleep = part.tag == asleep
    with pytest.raises(RuntimeError, match="sleep") if refused else nullcontext():
        require_mapped()
