"""Rows of a checkpoint read back from layers that vLLM's own loaders have filled."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import vllm.model_executor.parameter as vllm_parameter  # noqa: E402
from vllm._custom_ops import cpu_prepack_moe_weight  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: E402
from vllm.model_executor.parameter import ModelWeightParameter  # noqa: E402

from skyctl.engines.vllm.inside.digest import _bytes, answer_rows  # noqa: E402
from skyctl.engines.vllm.inside.wire import RowAnswer, RowQuestion, row_number  # noqa: E402
from tests.unit.engines.test_digest import Packed  # noqa: E402

HIDDEN, HEAD, HEADS, KV_HEADS, WIDE, WORDS, EXPERTS = 64, 8, 8, 2, 64, 96, 2
PLACES: dict[str, tuple[str, Any]] = {
    "q_proj.weight": ("qkv.weight", "q"),
    "k_proj.weight": ("qkv.weight", "k"),
    "v_proj.weight": ("qkv.weight", "v"),
    "k_proj.bias": ("qkv.bias", "k"),
    "gate_proj.weight": ("gate_up.weight", 0),
    "up_proj.weight": ("gate_up.weight", 1),
    "gate_up_proj.weight": ("gate_up.weight", None),
    "down_proj.weight": ("down.weight", None),
    "embed.weight": ("embed.weight", None),
    "norm.weight": ("norm.weight", None),
}
SHAPES = {
    "q_proj.weight": (HEADS * HEAD, HIDDEN),
    "k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "k_proj.bias": (KV_HEADS * HEAD,),
    "gate_proj.weight": (WIDE, HIDDEN),
    "up_proj.weight": (WIDE, HIDDEN),
    "down_proj.weight": (HIDDEN, WIDE),
    "embed.weight": (WORDS, HIDDEN),
    "norm.weight": (HIDDEN,),
    **{
        f"experts.{e}.{part}.weight": (WIDE, HIDDEN)
        for e in range(EXPERTS)
        for part in ("w1", "w3")
    },
    **{f"experts.{e}.w2.weight": (HIDDEN, WIDE) for e in range(EXPERTS)},
}


def layer_of(
    kind: Any, rank: int, size: int, shapes: dict[str, tuple[int, ...]], **has: Any
) -> Any:
    """A layer of one tensor-parallel rank, without the processes that it belongs to."""
    layer = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in {"tp_rank": rank, "tp_size": size, **has}.items():
        setattr(layer, name, value)
    for name, shape in shapes.items():
        if issubclass(kind, LinearBase) and name == "weight":
            parameter = ModelWeightParameter(
                data=torch.zeros(shape),
                input_dim=1,
                output_dim=0,
                weight_loader=layer.weight_loader_v2,
            )
            parameter.tp_rank, parameter.tp_size = rank, size
        else:
            parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            parameter.output_dim, parameter.input_dim = 0, 1
            parameter.weight_loader = layer.weight_loader
        layer.register_parameter(name, parameter)
    return layer


@pytest.fixture(autouse=True)
def _without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters ask for their rank as they are made; `layer_of` tells them another."""
    for name in ("rank", "world_size"):
        monkeypatch.setattr(vllm_parameter, f"get_tensor_model_parallel_{name}", lambda: 0)


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    """One rank's layers, and a loader that renames as vLLM's models do."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        heads, kv_heads = HEADS // size, max(1, KV_HEADS // size)
        rows = (heads + 2 * kv_heads) * HEAD
        self.qkv = layer_of(
            QKVParallelLinear,
            rank,
            size,
            {"weight": (rows, HIDDEN), "bias": (rows,)},
            total_num_heads=HEADS,
            total_num_kv_heads=KV_HEADS,
            num_heads=heads,
            num_kv_heads=kv_heads,
            num_kv_head_replicas=max(1, size // KV_HEADS),
            head_size=HEAD,
            v_head_size=HEAD,
        )
        self.gate_up = layer_of(
            MergedColumnParallelLinear,
            rank,
            size,
            {"weight": (2 * WIDE // size, HIDDEN)},
            output_sizes=[WIDE, WIDE],
        )
        self.down = layer_of(
            RowParallelLinear,
            rank,
            size,
            {"weight": (HIDDEN, WIDE // size)},
            input_size=WIDE,
            input_size_per_partition=WIDE // size,
        )
        words = WORDS // size
        self.embed = layer_of(
            VocabParallelEmbedding,
            rank,
            size,
            {"weight": (words, HIDDEN)},
            org_vocab_size=WORDS,
            shard_indices=SimpleNamespace(
                org_vocab_start_index=rank * words, org_vocab_end_index=(rank + 1) * words
            ),
        )
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        part = WIDE // size
        self.experts = layer_of(
            RoutedExperts,
            rank,
            size,
            {"w13_weight": (EXPERTS, 2 * part, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, part)},
            expert_map_manager=SimpleNamespace(map_global_to_local=lambda expert: expert),
            moe_config=SimpleNamespace(
                moe_parallel_config=SimpleNamespace(tp_rank=rank, tp_size=size)
            ),
            quant_method=UnquantizedFusedMoEMethod(),
        )

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name.startswith("experts."):
                _, expert, part, _ = name.split(".")
                parameter = self.experts.w2_weight if part == "w2" else self.experts.w13_weight
                parameter.weight_loader(
                    param=parameter,
                    loaded_weight=tensor.unsqueeze(0).unbind()[0],
                    weight_name=name,
                    shard_id=part,
                    expert_id=int(expert),
                    return_success=True,
                )
                continue
            place, shard = PLACES[name]
            parameter = self.get_parameter(place)
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *(() if shard is None else (shard,)))


class UnquantizedFusedMoEMethod:
    """The name is looked at; vLLM's needs a whole configuration."""

    moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(isa="vec"))


def checkpoint() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def filled(rank: int, size: int, tensors: dict[str, Any]) -> Model:
    model = Model(rank, size)
    model.load_weights((n, t) for n, t in tensors.items() if not n.startswith("experts."))
    part = slice(rank * WIDE // size, (rank + 1) * WIDE // size)
    w13 = [
        torch.cat([tensors[f"experts.{e}.{w}.weight"][part] for w in ("w1", "w3")])
        for e in range(EXPERTS)
    ]
    w2 = [tensors[f"experts.{e}.w2.weight"][:, part] for e in range(EXPERTS)]
    for name, stacked in (("w13_weight", w13), ("w2_weight", w2)):
        packed = cpu_prepack_moe_weight(torch.stack(stacked).contiguous(), "vec")
        getattr(model.experts, name).data.copy_(packed)
    return model


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
def test_every_rank_answers_with_its_part_of_every_row(size: int) -> None:
    tensors = checkpoint()
    models = [filled(rank, size, tensors) for rank in range(size)]
    questions = [question(name, tensor) for name, tensor in tensors.items()]
    by_rank = [answer_rows(model, questions) for model in models]
    for number, asked in enumerate(questions):
        answers = [rank[number] for rank in by_rank]
        check(asked, tensors[asked.name], answers, "float32")


def test_a_tensor_that_the_checkpoint_has_fused_already_is_found() -> None:
    tensors = checkpoint()
    tensors["gate_up_proj.weight"] = torch.cat(
        [tensors["gate_proj.weight"], tensors["up_proj.weight"]]
    )
    asked = question("gate_up_proj.weight", tensors["gate_up_proj.weight"])
    answers = [answer_rows(filled(rank, 2, tensors), [asked])[0] for rank in range(2)]
    check(asked, tensors[asked.name], answers, "float32")


def test_exchanged_halves_of_a_fused_layer_are_seen() -> None:
    tensors = checkpoint()
    model = filled(0, 1, tensors)
    model.gate_up.weight.data = model.gate_up.weight.data.flip(0)
    asked = question("gate_proj.weight", tensors["gate_proj.weight"])
    (answer,) = answer_rows(model, [asked])
    with pytest.raises(AssertionError):
        check(asked, tensors["gate_proj.weight"], [answer], "float32")


def test_experts_that_were_left_unpacked_are_seen() -> None:
    tensors = checkpoint()
    model = filled(0, 1, tensors)
    unpacked = [tensors[f"experts.{expert}.w2.weight"] for expert in range(EXPERTS)]
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
    held: str, asked: str, said: str
) -> None:
    tensor = checkpoint()["norm.weight"].to(getattr(torch, asked))
    model = Model(0, 1)
    model.norm.weight.data = tensor.to(getattr(torch, held))
    asks = question("norm.weight", tensor)
    check(asks, tensor, answer_rows(model, [asks]), said)


def test_a_float32_layer_that_holds_more_than_the_checkpoint_says_so() -> None:
    tensor = checkpoint()["norm.weight"]
    model = Model(0, 1)
    model.norm.weight.data = tensor
    (answer,) = answer_rows(model, [question("norm.weight", tensor, torch.bfloat16)])
    assert answer.dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_layer_is_read_through_its_kernel(dtype: str) -> None:
    tensor = checkpoint()["down_proj.weight"].to(getattr(torch, dtype))
    tensor[0, 20:30] = torch.tensor(-0.0)
    model = Model(0, 1)
    packed = Packed(tensor)
    model.down.weight, model.down.cpu_linear = packed.weight, packed.cpu_linear
    asked = question("down_proj.weight", tensor)
    check(asked, tensor, answer_rows(model, [asked]), dtype)
    tensor[0, 0] = float("nan")
    assert "not finite" in answer_rows(model, [asked])[0].reason


def test_a_tied_output_layer_answers_for_its_own_copy_too() -> None:
    tensor = checkpoint()["embed.weight"]
    model = Model(0, 1)
    head = layer_of(
        VocabParallelEmbedding,
        0,
        1,
        {},
        shard_indices=model.embed.shard_indices,
        embedding_dim=HIDDEN,
        tie_weights=None,
    )
    model.embed.weight.data.copy_(tensor)
    head.weight, stale = model.embed.weight, torch.zeros(WORDS, HIDDEN)
    head.cpu_linear = Packed(stale).cpu_linear
    model.head = head
    asked = question("embed.weight", tensor)
    (answer,) = answer_rows(model, [asked])
    assert len(answer.pieces) == 2 * len(asked.rows)
    with pytest.raises(AssertionError):
        check(asked, tensor, [answer], "float32")
    stale.copy_(tensor)
    check(asked, tensor, answer_rows(model, [asked]), "float32")


class Rearranging(Model):
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        super().load_weights((name, tensor.t()) for name, tensor in weights)


def test_what_cannot_be_compared_is_said_and_parameters_are_left_as_they_were() -> None:
    tensors = checkpoint()
    model = Rearranging(0, 1)
    asked = question("down_proj.weight", tensors["down_proj.weight"])
    assert answer_rows(model, [asked])[0].reason == "vLLM rearranges it when it is loaded"
    model = Model(0, 1)
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


def test_an_expert_of_another_rank_is_elsewhere() -> None:
    tensors = checkpoint()
    model = filled(0, 1, tensors)
    model.experts.expert_map_manager.map_global_to_local = lambda expert: -1
    asked = question("experts.1.w1.weight", tensors["experts.1.w1.weight"])
    (answer,) = answer_rows(model, [asked])
    assert answer == RowAnswer(asked.name, elsewhere=True)


def test_a_single_value_is_read_whatever_its_stride() -> None:
    assert _bytes(torch.ones(4).as_strided((1,), (4,))) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_dtype_that_torch_does_not_promote_is_answered_as_it_is_held(dtype: str) -> None:
    model = filled(0, 1, checkpoint())
    asked = question("norm.weight", model.norm.weight, dtype)
    check(asked, model.norm.weight.detach(), answer_rows(model, [asked]), "float32")


def test_float8_is_answered_in_float8() -> None:
    tensor = torch.arange(HIDDEN).to(torch.float8_e4m3fn)
    model = filled(0, 1, checkpoint())
    model.norm.weight = torch.nn.Parameter(tensor, requires_grad=False)
    asked = question("norm.weight", tensor)
    check(asked, tensor, answer_rows(model, [asked]), "float8_e4m3fn")
