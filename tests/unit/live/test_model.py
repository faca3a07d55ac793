"""What a rank has of a model: modules, state dicts, DTensors of any mesh, functions of slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyctl.errors import PreflightError, UsageError
from skyctl.live.blocks import Block, Target, refuse_unlike, senders
from skyctl.live.model import Pair, addresses, read_pairs


def targets(tensors: dict[str, torch.Tensor], dtype: str = "float32") -> list[Target]:
    return [Target(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def assembled(ranks: list[list[Pair]], expected: list[Target]) -> dict[str, torch.Tensor]:
    """What servers would get: each rank sends what `senders` leaves it."""
    refuse_unlike([[block for block, _ in pairs] for pairs in ranks], expected)
    whole = {
        target.name: torch.full(target.shape, math.nan, dtype=getattr(torch, target.dtype))
        for target in expected
    }
    chosen = senders([[block for block, _ in pairs] for pairs in ranks])
    for pairs, blocks in zip(ranks, chosen, strict=True):
        for block, local in pairs:
            if block in blocks:
                spans = zip(block.start, block.size, strict=True)
                at = tuple(slice(start, start + size) for start, size in spans)
                whole[block.tensor][at].copy_(local)
    return whole


def on_each_rank(world_size: int, read: Callable[[], list[Pair]]) -> list[list[Pair]]:
    """`read` as every rank of a job; collectives of a fake group do nothing."""
    ranks = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            ranks.append(read())
        finally:
            dist.destroy_process_group()
    return ranks


def sharded(full: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """The DTensor of which this rank has what torch itself says."""
    size, start = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))].clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((2,), [Shard(-1)]),
        ((3,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 3), [Shard(1), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [8, 7, 3])
def test_shards_of_any_mesh_are_the_tensor_again(
    mesh_shape: tuple[int, ...], placements: list[Any], rows: int
) -> None:
    if any(hasattr(placement, "split_factor") for placement in placements):
        rows = 8  # FSDP refuses others
    full = {"w": torch.arange(rows * 5.0).reshape(rows, 5)}

    def read() -> list[Pair]:
        mesh = init_device_mesh("cpu", mesh_shape)
        return read_pairs({"w": sharded(full["w"], mesh, placements)}, targets(full))

    ranks = on_each_rank(math.prod(mesh_shape), read)
    assert torch.equal(assembled(ranks, targets(full))["w"], full["w"])
    if all(isinstance(placement, Shard) for placement in placements):
        elements = [block.elements for pairs in ranks for block, _ in pairs]
        assert sum(elements) == full["w"].numel(), "nothing is gathered"


def test_a_rank_reads_its_own_memory() -> None:
    def read() -> list[Pair]:
        weight = sharded(torch.ones(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        pairs = read_pairs({"w": weight}, [Target("w", "bfloat16", (6, 4))])
        assert pairs[0][1].data_ptr() == weight.to_local().data_ptr()
        return pairs

    (block, local), *_ = on_each_rank(2, read)[1]
    assert block == Block("w", "bfloat16", (6, 4), (3, 0), (3, 4))
    assert local.dtype is torch.float32, "it is cast on the way"


def test_values_that_no_rank_has_are_refused() -> None:
    def read() -> list[Pair]:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        return read_pairs({"w": partial}, [Target("w", "float32", (2,))])

    with pytest.raises(PreflightError, match=r"w is placed as P.*no rank has the values"):
        on_each_rank(2, read)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    "names",
    [["embed.weight", "scale"], ["embed.weight", "head.weight", "scale"]],
    ids=["once", "twice"],
)
def test_tied_tensors_are_sent_as_often_as_the_servers_run_them(names: list[str]) -> None:
    model = Tied()
    expected = targets({name: model.state_dict()[name] for name in names})
    for form in (model, torch.compile(model), model.state_dict()):
        whole = assembled([read_pairs(form, expected)], expected)
        assert all(torch.equal(whole[name], model.state_dict()[name]) for name in names)


def split(prefix: str) -> Callable[[str], list[str] | str | None]:
    fused = {
        "qkv": [f"{prefix}q", f"{prefix}k", f"{prefix}v"],
        "experts": [f"{prefix}{expert}.{part}" for expert in range(3) for part in ("gate", "up")],
        "down": [f"{prefix}{expert}.down" for expert in range(3)],
        "own": None,
    }
    return lambda name: fused.get(name, prefix + name)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_fused_tensors_are_split_wherever_they_are_cut(placement: Any) -> None:
    fused = {
        "qkv": torch.randn(8, 6),
        "experts": torch.randn(3, 8, 5),
        "down": torch.randn(3, 5, 4),
        "norm": torch.randn(6, 2),
        "own": torch.randn(4, 4),
    }
    whole = dict(zip("qkv", fused["qkv"].split([4, 2, 2]), strict=True))
    for expert in range(3):
        gate, up = fused["experts"][expert].split([4, 4])
        whole |= {
            f"{expert}.gate": gate,
            f"{expert}.up": up,
            f"{expert}.down": fused["down"][expert],
        }
    whole |= {"norm": fused["norm"]}
    expected = {f"m.{name}": tensor for name, tensor in whole.items()}

    def read() -> list[Pair]:
        mesh = init_device_mesh("cpu", (2,))
        model = {name: sharded(tensor, mesh, [placement]) for name, tensor in fused.items()}
        return read_pairs(model, targets(expected), names=split("m."))

    got = assembled(on_each_rank(2, read), targets(expected))
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"w": ["a", "b"]}, "names: w has 24 elements, the 2 tensors.* have 16"),
        ({"w": ["a", "c", "b"]}, r"names: c \[4, 4\] is not a run of rows of w \[6, 4\]"),
        ({"w": ["a", "x"]}, "names: w → x, which is not in the model"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(names: dict[str, Any], message: str) -> None:
    expected = [
        Target("a", "float32", (3, 4)),
        Target("b", "float32", (1, 4)),
        Target("c", "float32", (4, 4)),
    ]
    with pytest.raises(PreflightError, match=message):
        read_pairs({"w": torch.zeros(6, 4)}, expected, names=names)


def test_a_function_gives_the_parts_of_other_layouts() -> None:
    """As Megatron interleaves projections by groups of heads."""
    full = {name: torch.randn(8, 3) for name in "qk"}
    interleaved = torch.cat(
        [torch.cat([full["q"][i : i + 2], full["k"][i : i + 2]]) for i in range(0, 8, 2)]
    )

    def of_rank(rank: int) -> Callable[[str, tuple[int, ...]], Iterator[Any]]:
        own = interleaved[rank * 8 : rank * 8 + 8]

        def slices(name: str, shape: tuple[int, ...]) -> Iterator[Any]:
            assert shape == (8, 3)
            for group in range(2):
                begin = group * 4 + "qk".index(name) * 2
                yield (rank * 4 + group * 2, 0), own[begin : begin + 2]

        return slices

    ranks = [read_pairs(of_rank(rank), targets(full)) for rank in range(2)]
    whole = assembled(ranks, targets(full))
    assert all(torch.equal(whole[name], full[name]) for name in full)
    with pytest.raises(UsageError, match="a function of slices needs"):
        read_pairs(of_rank(0), [], dtype=None)


@pytest.mark.parametrize(
    ("dtype", "sent_as"),
    [("match", "bfloat16"), ("as-is", "float32"), ("float16", "float16")],
)
def test_masters_are_sent_as_the_dtype_that_is_chosen(dtype: str, sent_as: str) -> None:
    expected = [Target("w", "bfloat16", (2,)), Target("n", "int64", (1,))]
    model = {"w": torch.ones(2), "n": torch.ones(1, dtype=torch.int64)}
    pairs = read_pairs(model, expected, dtype=dtype)
    assert [block.dtype for block, _ in pairs] == [sent_as, "int64"]


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"w": torch.ones(3)}, PreflightError, r"w is \[3\] here, the servers run \[2\]"),
        ({"w": torch.ones(2, dtype=torch.float64)}, PreflightError, "w is float64 here, float32"),
        ({"model.w": torch.ones(2)}, PreflightError, "model.w is not in the model .*; w is"),
        ({"w": torch.empty(2, device="meta")}, UsageError, "w is on the meta device"),
        ({"w": torch.ones(2).to_sparse()}, UsageError, "w is torch.sparse_coo"),
        ({"w": 3}, UsageError, "pairs of a name and a torch.Tensor, not of str and int"),
        ([1], UsageError, "list is not a model"),
    ],
)
def test_what_servers_do_not_run_is_refused(
    model: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_pairs(model, [Target("w", "float32", (2,))], dtype=None)


def test_without_the_servers_model_names_and_shapes_are_the_trainers() -> None:
    model = {"a": torch.ones(2), "b": torch.ones(1, dtype=torch.float16)}
    pairs = read_pairs(model, [], dtype=None)
    assert [(block.tensor, block.dtype, block.shape) for block, _ in pairs] == [
        ("a", "float32", (2,)),
        ("b", "float16", (1,)),
    ]
    with pytest.raises(UsageError, match='dtype="match" needs'):
        read_pairs(model, [])


def test_fsdp_1_is_refused() -> None:
    wrapper = type("FullyShardedDataParallel", (torch.nn.Linear,), {})
    with pytest.raises(PreflightError, match="FSDP 1"):
        read_pairs(torch.nn.Sequential(wrapper(2, 2)), [], dtype=None)


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3), 2)), ids=str)
def test_every_pair_of_sharding_dimensions_is_read(axes: tuple[int, int]) -> None:
    full = {"w": torch.arange(60.0).reshape(3, 4, 5)}

    def read() -> list[Pair]:
        mesh = init_device_mesh("cpu", (2, 2))
        weight = sharded(full["w"], mesh, [Shard(axis) for axis in axes])
        return read_pairs({"w": weight}, targets(full))

    assert torch.equal(assembled(on_each_rank(4, read), targets(full))["w"], full["w"])


def test_a_module_has_moved_once_a_tensor_of_any_module_within_it_has() -> None:
    inner = torch.nn.ModuleList([torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2)])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), inner)
    model.register_module("tied", inner[1])
    model.register_module("absent", None)
    model.register_module("itself", model)
    before = addresses(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert before is not None and {row[1:3] for row in before} == {
        (id(t), t.data_ptr()) for t in tensors
    }
    assert addresses(model) == before
    inner[0].running_mean = torch.ones(2)
    moved = addresses(model)
    assert moved != before
    inner[1] = torch.nn.Linear(2, 2)
    assert addresses(model) != moved


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model._modules.update(b=model._modules.pop("a")),
        lambda model: setattr(model.a.weight, "data", model.a.weight.data.t()),
        lambda model: setattr(model.a.weight, "data", model.a.weight.data.flatten()),
    ],
    ids=["name", "stride", "shape"],
)
def test_tensors_have_moved_once_their_names_or_forms_are_others(change: Any) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False)})
    pointer = model.a.weight.data_ptr()
    before = addresses(model)
    change(model)
    after = addresses(model)
    assert after is not None and after[0][2] == pointer and after != before


def test_an_object_with_a_state_dict_that_is_not_a_module_is_read_anew_for_each_push() -> None:
    weights = SimpleNamespace(state_dict=lambda: {"w": torch.ones(2)})
    assert addresses(weights) is None
    [(block, tensor)] = read_pairs(weights, targets({"w": torch.zeros(2)}))
    assert block.tensor == "w" and torch.equal(tensor, torch.ones(2))
