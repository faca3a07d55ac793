"""Rows of a checkpoint read back from layers that vLLM's own loaders have filled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from skyctl.engines.vllm.inside.digest import _bytes, answer_rows  # noqa: E402
from skyctl.wire.messages import RowAnswer, RowQuestion, row_number  # noqa: E402
from tests.unit.engines.digest_cases import Packed  # noqa: E402


@pytest.fixture
def layers(vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of layers, as it is without groups of processes: parameters ask for their rank as
    they are made, and `layer_of` tells them another."""
    from tests.unit.engines import vllm_layers

    for name in ("rank", "world_size"):
        asked = f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}"
        monkeypatch.setattr(asked, lambda: 0)
    return vllm_layers


def question(name: str, tensor: Any, dtype: Any = None) -> RowQuestion:
    shape = list(tensor.shape)
    height, width = (1, shape[0]) if len(shape) == 1 else (shape[0], tensor[0].numel())
    rows = sorted({0, height // 2 - 1 if height > 1 else 0, height - 1})
    named = str(dtype or tensor.dtype).removeprefix("torch.")
    return RowQuestion(name, named, shape, rows, width // 4, width // 4 + width // 2)


def check(asked: RowQuestion, tensor: Any, answers: list[RowAnswer], dtype: str) -> None:
    """Every piece is the checkpoint's, and together they are all that was asked for."""
    matrix = tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.flatten(1)
    seen: set[tuple[int, int]] = set()
    for answer in answers:
        assert answer.name == asked.name
        assert answer.reason == ""
        assert answer.elsewhere is not bool(answer.pieces)
        for row, begin, end, number in answer.pieces:
            assert answer.dtype == dtype
            values = matrix[row, begin:end].to(getattr(torch, dtype)).contiguous()
            assert number == row_number(bytes(values.view(torch.uint8).numpy()), dtype)
            seen |= {(row, column) for column in range(begin, end)}
    assert seen == {(r, c) for r in asked.rows for c in range(asked.begin, asked.end)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_answers_with_its_part_of_every_row(layers: Any, size: int) -> None:
    tensors = layers.checkpoint()
    models = [layers.filled(rank, size, tensors) for rank in range(size)]
    questions = [question(name, tensor) for name, tensor in tensors.items()]
    by_rank = [answer_rows(model, questions) for model in models]
    for number, asked in enumerate(questions):
        answers = [rank[number] for rank in by_rank]
        check(asked, tensors[asked.name], answers, "float32")


def test_a_tensor_that_the_checkpoint_has_fused_already_is_found(layers: Any) -> None:
    tensors = layers.checkpoint()
    tensors["gate_up_proj.weight"] = torch.cat(
        [tensors["gate_proj.weight"], tensors["up_proj.weight"]]
    )
    asked = question("gate_up_proj.weight", tensors["gate_up_proj.weight"])
    answers = [answer_rows(layers.filled(rank, 2, tensors), [asked])[0] for rank in range(2)]
    check(asked, tensors[asked.name], answers, "float32")


def test_exchanged_halves_of_a_fused_layer_are_seen(layers: Any) -> None:
    tensors = layers.checkpoint()
    model = layers.filled(0, 1, tensors)
    model.gate_up.weight.data = model.gate_up.weight.data.flip(0)
    asked = question("gate_proj.weight", tensors["gate_proj.weight"])
    (answer,) = answer_rows(model, [asked])
    with pytest.raises(AssertionError):
        check(asked, tensors["gate_proj.weight"], [answer], "float32")


def test_experts_that_were_left_unpacked_are_seen(layers: Any) -> None:
    tensors = layers.checkpoint()
    model = layers.filled(0, 1, tensors)
    unpacked = [tensors[f"experts.{expert}.w2.weight"] for expert in range(layers.EXPERTS)]
    model.experts.w2_weight.data.copy_(torch.stack(unpacked))
    asked = question("experts.1.w2.weight", unpacked[1])
    (answer,) = answer_rows(model, [asked])
    with pytest.raises(AssertionError):
        check(asked, unpacked[1], [answer], "float32")


@pytest.mark.parametrize(
    ("held", "asked", "said"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float16", "bfloat16"),
    ],
)
def test_numbers_are_of_the_checkpoints_dtype_where_nothing_was_rounded(
    layers: Any, held: str, asked: str, said: str
) -> None:
    tensor = layers.checkpoint()["norm.weight"].to(getattr(torch, asked))
    model = layers.Model(0, 1)
    model.norm.weight.data = tensor.to(getattr(torch, held))
    asks = question("norm.weight", tensor)
    check(asks, tensor, answer_rows(model, [asks]), said)


def test_a_float32_layer_that_holds_more_than_the_checkpoint_says_so(layers: Any) -> None:
    tensor = layers.checkpoint()["norm.weight"]
    model = layers.Model(0, 1)
    model.norm.weight.data = tensor
    (answer,) = answer_rows(model, [question("norm.weight", tensor, torch.bfloat16)])
    assert answer.dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_layer_is_read_through_its_kernel(layers: Any, dtype: str) -> None:
    tensor = layers.checkpoint()["down_proj.weight"].to(getattr(torch, dtype))
    tensor[0, 20:30] = torch.tensor(-0.0)
    model = layers.Model(0, 1)
    packed = Packed(tensor)
    model.down.weight, model.down.cpu_linear = packed.weight, packed.cpu_linear
    asked = question("down_proj.weight", tensor)
    check(asked, tensor, answer_rows(model, [asked]), dtype)
    tensor[0, 0] = float("nan")
    assert "not finite" in answer_rows(model, [asked])[0].reason


def test_a_tied_output_layer_answers_for_its_own_copy_too(layers: Any) -> None:
    tensor = layers.checkpoint()["embed.weight"]
    model = layers.Model(0, 1)
    head = layers.layer_of(
        layers.VocabParallelEmbedding,
        0,
        1,
        {},
        shard_indices=model.embed.shard_indices,
        embedding_dim=layers.HIDDEN,
        tie_weights=None,
    )
    model.embed.weight.data.copy_(tensor)
    head.weight, stale = model.embed.weight, torch.zeros(layers.WORDS, layers.HIDDEN)
    head.cpu_linear = Packed(stale).cpu_linear
    model.head = head
    asked = question("embed.weight", tensor)
    (answer,) = answer_rows(model, [asked])
    assert len(answer.pieces) == 2 * len(asked.rows)
    with pytest.raises(AssertionError):
        check(asked, tensor, [answer], "float32")
    stale.copy_(tensor)
    check(asked, tensor, answer_rows(model, [asked]), "float32")


def test_what_cannot_be_compared_is_said_and_parameters_are_left_as_they_were(layers: Any) -> None:
    tensors = layers.checkpoint()
    model = layers.Rearranging(0, 1)
    asked = question("down_proj.weight", tensors["down_proj.weight"])
    assert answer_rows(model, [asked])[0].reason == "vLLM rearranges it when it is loaded"
    model = layers.Model(0, 1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    loaders = {name: getattr(p, "weight_loader", None) for name, p in model.named_parameters()}
    unknown = RowQuestion("rotary.inv_freq", "float32", [4], [0], 0, 4)
    quantized = question("up_proj.weight", tensors["up_proj.weight"])
    model.gate_up.quant_method = SimpleNamespace()
    reasons = [answer.reason for answer in answer_rows(model, [unknown, quantized])]
    assert reasons[0].startswith("vLLM's loader refuses it")
    assert reasons[1] == "the layer is quantized (SimpleNamespace)"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert getattr(parameter, "weight_loader", None) == loaders[name]


def test_an_expert_of_another_rank_is_elsewhere(layers: Any) -> None:
    tensors = layers.checkpoint()
    model = layers.filled(0, 1, tensors)
    model.experts.expert_map_manager.map_global_to_local = lambda expert: -1
    asked = question("experts.1.w1.weight", tensors["experts.1.w1.weight"])
    (answer,) = answer_rows(model, [asked])
    assert answer == RowAnswer(asked.name, elsewhere=True)


def test_a_single_value_is_read_whatever_its_stride() -> None:
    assert _bytes(torch.ones(4).as_strided((1,), (4,))) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_dtype_that_torch_does_not_promote_is_answered_as_it_is_held(
    layers: Any, dtype: str
) -> None:
    model = layers.filled(0, 1, layers.checkpoint())
    asked = question("norm.weight", model.norm.weight, dtype)
    check(asked, model.norm.weight.detach(), answer_rows(model, [asked]), "float32")


def test_float8_is_answered_in_float8(layers: Any) -> None:
    tensor = torch.arange(layers.HIDDEN).to(torch.float8_e4m3fn)
    model = layers.filled(0, 1, layers.checkpoint())
    model.norm.weight = torch.nn.Parameter(tensor, requires_grad=False)
    asked = question("norm.weight", tensor)
    check(asked, tensor, answer_rows(model, [asked]), "float8_e4m3fn")
