"""Which checkpoint tensors a running model's parameters are made of.

Described are only kinds of layers whose parameters are pieces of the checkpoint's tensors, bit by
bit, or are made of such by a known way of processing; every other parameter gets a reason, and
vLLM's loader fills it. A description is not trusted: before a push uses it, a push has compared it
with what vLLM's loader made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from skyctl.engines.vllm.inside.layout_process import unprocessed
from skyctl.wire.layouts import ParameterLayout, Part

UNQUANTIZED = (
    "NoneType",
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
)
"""Classes of a layer's `quant_method` that leave its weight as it is loaded."""
PLAIN_METHODS = {*UNQUANTIZED, "_GateLinearMethod"}
EXPERT_BACKENDS = {"TRITON", "BATCHED_TRITON"}
_ATTENTION = {"Attention", "MMEncoderAttention"}


def describe(model: Any) -> list[ParameterLayout]:
    """One layout per parameter, shared ones once, in the model's order; for a layer that processes
    its weight, that of the weight as loaded.
    """
    packed: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", {}))
    seen: set[int] = set()
    layouts = []
    for path, module in model.named_modules():
        loaded = unprocessed(module)
        if loaded is not None:
            weight = _Parameter(path, module, "weight", loaded, packed)
            layouts.append(_describe(weight, processed=True))
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            if loaded is not None and name != "bias":
                continue
            seen.add(id(parameter))
            layouts.append(_describe(_Parameter(path, module, name, parameter, packed)))
    return layouts


def ignored_tensors(model: Any) -> list[str]:
    """Names of checkpoint tensors that the loader skips: a tied output layer's."""
    config = getattr(model, "config", None)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return ["lm_head.weight"] if tied else []


def whole_problem(model: Any) -> str:
    """Why no parameter of the model may be copied: something is derived from them at load time."""
    for path, module in model.named_modules():
        kind = type(module).__name__
        if not hasattr(module, "process_weights_after_loading") or kind in PLAIN_METHODS:
            continue
        if kind not in _ATTENTION:
            return f"{path} ({kind}) derives other tensors from its weights"
        if getattr(getattr(module, "impl", None), "sinks", None) is not None:
            return f"{path} keeps sinks of its own"
    return ""


class _Unknown(Exception):
    """A parameter that only vLLM's loader can fill; says why."""


@dataclass(frozen=True)
class _Parameter:
    """One parameter of a module."""

    path: str
    """Of the module."""
    module: Any
    """The layer."""
    name: str
    """Within the module."""
    tensor: Any
    """The parameter as it is loaded."""
    packed: Mapping[str, list[str]]
    """The projections of each fused module, by name."""

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_fused(self) -> bool:
        return self.path.rpartition(".")[2] in self.packed

    def whole(self) -> Part:
        count = prod(self.tensor.shape)
        return Part(self.full_name, tuple(self.tensor.shape), 1, count, 0, count, 0, count)


def _describe(parameter: _Parameter, *, processed: bool = False) -> ParameterLayout:
    tensor = parameter.tensor
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    try:
        if tensor.is_meta != processed or not tensor.is_contiguous():
            raise _Unknown(f"it is {'empty' if tensor.is_meta else 'not contiguous'}")
        parts = tuple(_parts(parameter))
    except _Unknown as why:
        return ParameterLayout(parameter.full_name, dtype, shape, reason=str(why))
    zeros = tensor.numel() - sum(part.rows * part.row for part in parts)
    return ParameterLayout(parameter.full_name, dtype, shape, parts, zeros, processed=processed)


def _parts(parameter: _Parameter) -> Iterator[Part]:
    module = parameter.module
    method = type(getattr(module, "quant_method", None)).__name__
    if method not in PLAIN_METHODS and unprocessed(module) is None:
        raise _Unknown(f"{method} processes it")
    kind = type(module).__name__
    if hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
        return _experts(parameter)
    describe_kind = _KINDS.get(kind)
    if describe_kind is not None:
        return describe_kind(parameter)
    loader = getattr(parameter.tensor, "weight_loader", None)
    if loader is not None and getattr(loader, "__name__", "") != "default_weight_loader":
        raise _Unknown(f"{kind} loads it in a way of its own")
    return iter([parameter.whole()])


def _rows(tensor: str, shape: Sequence[int], begin: int, count: int, target: int) -> Part:
    """`count` slices of the first dimension, from `begin` on."""
    width = prod(shape[1:])
    size = count * width
    return Part(tensor, tuple(shape), 1, size, begin * width, size, target, size)


def _columns(tensor: str, shape: Sequence[int], begin: int, count: int, target: int) -> Part:
    """`count` columns of a matrix, from `begin` on, side by side."""
    height, width = shape
    return Part(tensor, tuple(shape), height, count, begin, width, target, count)


def _replicated(parameter: _Parameter) -> Iterator[Part]:
    if parameter.is_fused:
        raise _Unknown("it is fused, and not split among ranks")
    yield parameter.whole()


def _column(parameter: _Parameter) -> Iterator[Part]:
    if parameter.is_fused:
        raise _Unknown("it is fused in an unknown way")
    rows = parameter.tensor.shape[0]
    shape = (rows * parameter.module.tp_size, *parameter.tensor.shape[1:])
    yield _rows(parameter.full_name, shape, rows * parameter.module.tp_rank, rows, 0)


def _row(parameter: _Parameter) -> Iterator[Part]:
    if parameter.name != "weight":
        yield parameter.whole()
        return
    height, width = parameter.tensor.shape
    shape = (height, width * parameter.module.tp_size)
    yield _columns(parameter.full_name, shape, width * parameter.module.tp_rank, width, 0)


def _merged(parameter: _Parameter) -> Iterator[Part]:
    module = parameter.module
    return _fused(
        parameter, [(size, module.tp_rank, module.tp_size) for size in module.output_sizes]
    )


def _qkv(parameter: _Parameter) -> Iterator[Part]:
    module = parameter.module
    head, value_head = module.head_size, getattr(module, "v_head_size", module.head_size)
    key_rank = module.tp_rank // module.num_kv_head_replicas
    key_ranks = max(1, module.tp_size // module.num_kv_head_replicas)
    blocks = [
        (module.total_num_heads * head, module.tp_rank, module.tp_size),
        (module.total_num_kv_heads * head, key_rank, key_ranks),
        (module.total_num_kv_heads * value_head, key_rank, key_ranks),
    ]
    return _fused(parameter, blocks)


def _fused(parameter: _Parameter, blocks: Sequence[tuple[int, int, int]]) -> Iterator[Part]:
    """Projections stacked by rows; for each (total rows, rank, ranks)."""
    parent, _, last = parameter.path.rpartition(".")
    names = parameter.packed.get(last, _USUAL.get(last, []))
    if len(names) != len(blocks):
        raise _Unknown(f"it is made of {len(blocks)} projections whose names are not known")
    width, target = prod(parameter.tensor.shape[1:]), 0
    for projection, (size, rank, ranks) in zip(names, blocks, strict=True):
        rows = size // ranks
        shape = (size, *parameter.tensor.shape[1:])
        tensor = ".".join(filter(None, (parent, projection, parameter.name)))
        yield _rows(tensor, shape, rows * rank, rows, target)
        target += rows * width
    if target != parameter.tensor.numel():
        raise _Unknown("its projections do not fill it")


_USUAL = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def _vocabulary(parameter: _Parameter) -> Iterator[Part]:
    module = parameter.module
    if parameter.name != "weight" or module.num_added_embeddings:
        raise _Unknown("it holds more than the vocabulary")
    indices = module.shard_indices
    begin, end = indices.org_vocab_start_index, indices.org_vocab_end_index
    shape = (module.org_vocab_size, parameter.tensor.shape[1])
    yield _rows(parameter.full_name, shape, begin, end - begin, 0)  # the rest is padding


def _experts(parameter: _Parameter) -> Iterator[Part]:
    """w13 has gate and up of one expert after another, w2 their down projections."""
    module, name, config = parameter.module, parameter.name, parameter.module.moe_config
    parallel = config.moe_parallel_config
    backend = getattr(getattr(module.quant_method, "unquantized_backend", None), "name", "unknown")
    if backend not in EXPERT_BACKENDS:
        raise _Unknown(f"its backend {backend} may rearrange experts")
    manager = module.expert_map_manager
    if parallel.enable_eplb or config.num_experts != config.num_logical_experts:
        raise _Unknown("experts are moved between ranks")
    if manager.num_fused_shared_experts or not config.is_act_and_mul:
        raise _Unknown("its experts are not gate, up and down projections")
    if name not in ("w13_weight", "w2_weight"):
        raise _Unknown(f"{name} of experts is not known")
    count, hidden, inner = module.w2_weight.shape
    if tuple(module.w13_weight.shape) != (count, 2 * inner, hidden):
        raise _Unknown("w13 and w2 do not fit each other")
    padded = (config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded)
    if padded != (hidden, inner):
        raise _Unknown("its experts are padded")
    base = parameter.path.removesuffix(".routed_experts")
    whole, begin = inner * parallel.tp_size, inner * parallel.tp_rank
    gate, up, down = (getattr(module, f"ckpt_{role}_proj_name") for role in ("gate", "up", "down"))
    own_experts = filter(manager.is_local_expert, range(manager.global_num_experts))
    for expert in sorted(own_experts, key=manager.map_global_to_local):
        local = manager.map_global_to_local(expert)
        at = f"{base}.{expert}."
        if name == "w2_weight":
            target = local * hidden * inner
            yield _columns(f"{at}{down}.weight", (hidden, whole), begin, inner, target)
            continue
        for number, projection in enumerate((gate, up)):
            target = (local * 2 + number) * inner * hidden
            yield _rows(f"{at}{projection}.weight", (whole, hidden), begin, inner, target)


_KINDS: dict[str, Callable[[_Parameter], Iterator[Part]]] = {
    "ReplicatedLinear": _replicated,
    "GateLinear": _replicated,
    "ColumnParallelLinear": _column,
    "RowParallelLinear": _row,
    "MergedColumnParallelLinear": _merged,
    "QKVParallelLinear": _qkv,
    "VocabParallelEmbedding": _vocabulary,
    "ParallelLMHead": _vocabulary,
}
