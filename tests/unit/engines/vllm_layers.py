"""Layers of vLLM's own classes, filled by its own loaders, as any tensor-parallel rank has them.

Imports vLLM, which takes seconds: to be imported by what uses the fixture `vllm`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.parameter import ModelWeightParameter

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


class Rearranging(Model):
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        super().load_weights((name, tensor.t()) for name, tensor in weights)
