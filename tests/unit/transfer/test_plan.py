"""The chunk plan: nothing lost, nothing doubled, in an order that suits a layerwise loader."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError
from skyctl.transfer.plan import ChunkPlan, order_tensors, plan_chunks


def tensor(name: str, nbytes: int = 8) -> Tensor:
    return Tensor(name, "U8", (nbytes,), 0, 0, nbytes)


def ordered(*names: str) -> list[str]:
    return [placed.name for placed in order_tensors([tensor(name) for name in names])]


def test_embeddings_come_first_then_layers_by_number_then_the_rest() -> None:
    assert ordered(
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.10.mlp.down_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.embed_tokens.weight",
    ) == [
        "model.embed_tokens.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.10.mlp.down_proj.weight",
        "lm_head.weight",
        "model.norm.weight",
    ]


def test_what_is_fused_is_adjacent() -> None:
    names = [
        f"model.layers.0.self_attn.{p}.{k}"
        for p in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")
        for k in ("bias", "weight")
    ]
    names += [f"model.layers.0.mlp.{p}.weight" for p in ("down_proj", "gate_proj", "up_proj")]
    names_in_order = ordered(*names)
    fused = [name.split(".")[-2] for name in names_in_order]
    start = fused.index("q_proj")
    assert fused[start : start + 6] == ["q_proj"] * 2 + ["k_proj"] * 2 + ["v_proj"] * 2
    start = fused.index("gate_proj")
    assert fused[start : start + 2] == ["gate_proj", "up_proj"]


def test_a_layers_experts_are_together_and_in_order() -> None:
    names_in_order = ordered(
        *(f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight" for p in ("up", "gate", "down")
          for e in (10, 2) for i in (1, 0))
    )  # fmt: skip
    assert [name.split(".")[2] for name in names_in_order] == ["0"] * 6 + ["1"] * 6
    assert [name.split(".")[5] for name in names_in_order[:6]] == ["2"] * 3 + ["10"] * 3


def test_a_larger_tensor_gets_a_chunk_of_its_own_and_the_plan_says_so() -> None:
    plan = plan_chunks([tensor("a", 10), tensor("b", 100), tensor("c", 10)], 64)
    assert [[p.tensor.name for p in c.placed] for c in plan.chunks] == [["a"], ["b"], ["c"]]
    assert plan.grown == ("b",)
    assert plan.slot_bytes == 100


def test_overflow_closes_a_chunk_with_the_tensor_that_exceeds_it() -> None:
    sizes = {"a": 40, "b": 40, "c": 10, "d": 5}
    plan = plan_chunks(
        [tensor(n, s) for n, s in sizes.items()], 64, packing="overflow", alignment=1
    )
    assert [[p.tensor.name for p in c.placed] for c in plan.chunks] == [["a", "b"], ["c", "d"]]
    assert [p.offset for p in plan.chunks[0].placed] == [0, 40]


def test_nothing_to_send_and_no_size_are_refused() -> None:
    with pytest.raises(PreflightError):
        plan_chunks([], 64)
    with pytest.raises(PreflightError):
        plan_chunks([tensor("a")], 0)
    with pytest.raises(PreflightError, match="no bytes"):
        plan_chunks([tensor("a", 0)], 64)


@pytest.mark.parametrize("sizes", [(0, 100), (100, 0), (100, 0, 0, 100), (64, 0)])
def test_no_chunk_is_empty_though_tensors_are(sizes: tuple[int, ...]) -> None:
    tensors = [tensor(f"{place}", nbytes) for place, nbytes in enumerate(sizes)]
    plan = plan_chunks(tensors, 64)
    check_sound(plan, tensors, 64)
    assert all(chunk.payload_bytes for chunk in plan.chunks)


NAMES = st.from_regex(
    r"\A(model\.)?(embed|layers\.[0-9]{1,2}\.(mlp|q_proj|k_proj)|lm_head)\.[a-z]{1,3}\Z"
)
TENSORS = (
    st.dictionaries(NAMES, st.integers(0, 300), min_size=1, max_size=40)
    .filter(lambda sizes: any(sizes.values()))
    .map(lambda sizes: [tensor(name, nbytes) for name, nbytes in sizes.items()])
)


def check_sound(plan: ChunkPlan, tensors: list[Tensor], alignment: int) -> None:
    assert sorted(t.name for t in plan.tensors) == sorted(t.name for t in tensors)
    assert [c.index for c in plan.chunks] == list(range(len(plan.chunks)))
    for chunk in plan.chunks:
        end = 0
        for placed in chunk.placed:
            assert placed.offset >= end
            assert placed.offset % alignment == 0
            end = placed.offset + placed.tensor.nbytes
        assert end == chunk.size


@settings(max_examples=60)
@given(TENSORS, st.integers(1, 500), st.sampled_from([1, 64]))
@example([tensor("a.a", 65), tensor("b.a", 129), tensor("c.a", 0)], 257, 64)
def test_fit_keeps_every_tensor_once_and_every_chunk_within_bounds(
    tensors: list[Tensor], size: int, alignment: int
) -> None:
    plan = plan_chunks(tensors, size, alignment=alignment)
    check_sound(plan, tensors, alignment)
    for chunk in plan.chunks:
        assert chunk.size <= size or sum(p.tensor.nbytes > 0 for p in chunk.placed) == 1
    assert set(plan.grown) == {t.name for t in tensors if t.nbytes > size}
    assert plan.total_bytes == sum(t.nbytes for t in tensors)


@settings(max_examples=60)
@given(TENSORS, st.integers(1, 500))
def test_overflow_cuts_where_vllms_packed_consumer_cuts(tensors: list[Tensor], size: int) -> None:
    plan = plan_chunks(tensors, size, packing="overflow", alignment=1)
    check_sound(plan, tensors, 1)
    cut: list[list[str]] = [[]]
    total = 0
    for packed in plan.tensors:  # the rule of packed_nccl_broadcast_consumer
        cut[-1].append(packed.name)
        total += packed.nbytes
        if total > size:
            cut.append([])
            total = 0
    assert [[p.tensor.name for p in c.placed] for c in plan.chunks] == [
        names for names in cut if names
    ]


@settings(max_examples=30)
@given(TENSORS, st.randoms())
def test_order_does_not_depend_on_the_order_given(tensors: list[Tensor], random: object) -> None:
    shuffled = list(tensors)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert order_tensors(shuffled) == order_tensors(tensors)
