"""Where vLLM's own loader puts a checkpoint tensor: found by letting it load one without data.

`load_weights` renames, fuses and splits tensors as its model needs. Here each parameter gets a
loader that only notes what would be loaded into it, and the model is given a tensor on torch's meta
device under the checkpoint's name. What reaches a parameter unchanged is then located by the rules
of the layer that owns it; everything else cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from skyctl.engines.vllm.inside.layout import UNQUANTIZED
from skyctl.wire.messages import RowQuestion


class NotComparable(Exception):
    """Why a checkpoint tensor cannot be found in the model."""


@dataclass(frozen=True)
class Placement:
    """This worker's part of a checkpoint tensor."""

    layer: Any
    """The layer that holds it."""
    attribute: str
    """The name of its parameter."""
    row: int
    """Where it begins in the checkpoint's matrix."""
    column: int
    """Where it begins in the checkpoint's matrix."""
    height: int
    """Its rows."""
    width: int
    """Its columns."""
    held_row: int = 0
    """Where it begins in the layer's parameter, or in an expert of it."""
    held_column: int = 0
    """Where it begins in the layer's parameter, or in an expert of it."""
    expert: int | None = None
    """The number of the expert in this layer; None if there are none."""


@dataclass(frozen=True)
class _Load:
    """One call of a parameter's loader."""

    parameter: Any
    tensor: Any
    shard: Any
    expert: Any


@dataclass(frozen=True)
class _Loaded:
    """A parameter of a layer, and what is loaded into it for a question."""

    layer: Any
    attribute: str
    load: _Load
    question: RowQuestion

    def whole(self) -> Placement:
        height, width = self.question.matrix
        return Placement(self.layer, self.attribute, 0, 0, height, width)

    def rows(self, first: int, count: int, at: int = 0) -> Placement:
        """`count` of the checkpoint's rows from `first` on, which the layer holds from `held` on.
        For a tensor of one dimension: values.
        """
        layer, attribute = self.layer, self.attribute
        if len(self.question.shape) == 1:
            return Placement(layer, attribute, 0, first, 1, count, held_column=at)
        width = self.question.matrix[1]
        return Placement(layer, attribute, first, 0, count, width, held_row=at)

    def columns(self, first: int, count: int) -> Placement:
        return Placement(self.layer, self.attribute, 0, first, self.question.matrix[0], count)


@dataclass(frozen=True)
class Trace:
    """What vLLM's loader did with a tensor that was sent through it, or why it did nothing."""

    sent: Any
    loads: list[_Load]
    refusal: str


class Tracer:
    """Finds where `model` would load tensors to. Made by `tracing`."""

    def __init__(self, model: Any, own_loaders: dict[int, Any]) -> None:
        self._model = model
        self._own_loaders = own_loaders
        self._loads: list[_Load] = []
        self._owners: dict[int, list[tuple[Any, str]]] = {}
        for layer in model.modules():
            for attribute, parameter in layer._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append((layer, attribute))

    def note(
        self,
        param: Any,
        loaded_weight: Any,
        *arguments: Any,
        shard_id: Any = None,
        expert_id: Any = None,
        **_: Any,
    ) -> bool:
        """Replaces every parameter's loader; the signature is vLLM's."""
        shard = next((a for a in arguments if isinstance(a, int | tuple)), shard_id)
        if shard is None:
            shard = next((a for a in arguments if a in ("q", "k", "v", "w1", "w2", "w3")), None)
        self._loads.append(_Load(param, loaded_weight, shard, expert_id))
        return True

    def trace(self, questions: Sequence[RowQuestion]) -> list[Trace]:
        """What vLLM's loader does with each tensor, in order.

        All go through it in one call, which takes as long as a single tensor: a loader searches the
        whole model first. If it refuses one of them, each is sent alone.
        """
        sent = [
            torch.empty(question.shape, dtype=getattr(torch, question.dtype), device="meta")
            for question in questions
        ]
        named = [(question.name, tensor) for question, tensor in zip(questions, sent, strict=True)]
        refusals = {}
        try:
            self._load(named)
        except Exception:
            self._loads.clear()
            for number, item in enumerate(named):
                try:
                    self._load([item])
                except Exception as error:  # whatever a model makes of an unknown name
                    refusals[number] = f"vLLM's loader refuses it: {error}"
        by_storage: dict[int, list[_Load]] = {}
        for load in self._loads:
            by_storage.setdefault(_storage(load.tensor), []).append(load)
        return [
            Trace(tensor, by_storage.get(_storage(tensor), []), refusals.get(number, ""))
            for number, tensor in enumerate(sent)
        ]

    def _load(self, named: list[tuple[str, Any]]) -> None:
        with partial_loads():
            self._model.load_weights(named)

    def placements(self, question: RowQuestion, trace: Trace) -> list[Placement]:
        """All places on this worker that hold a part of the tensor; [] if only other workers do.

        Raises:
            NotComparable: the model does not hold the tensor as the checkpoint does.
        """
        if trace.refusal:
            raise NotComparable(trace.refusal)
        if not trace.loads:
            if _of_other_stage(question.name, self._model):
                return []
            raise NotComparable("vLLM loads nothing of it, or not as it is")
        places = []
        for load in trace.loads:
            if not _unchanged(load.tensor, trace.sent):
                raise NotComparable("vLLM rearranges it when it is loaded")
            for layer, attribute in self._owners.get(id(load.parameter), ()):
                own = self._own_loaders.get(id(load.parameter))
                places += _located(_Loaded(layer, attribute, load, question), own)
        return places


@contextmanager
def tracing(model: Any) -> Iterator[Tracer]:
    """A tracer for as long as the context is open; then the parameters' own loaders are back."""
    own = [
        (parameter, getattr(parameter, "weight_loader", None)) for parameter in model.parameters()
    ]
    tracer = Tracer(model, {id(parameter): loader for parameter, loader in own})
    replaced = []
    try:
        for parameter, loader in own:
            # a parameter that cannot be given another loader refuses data on the meta device
            with suppress(AttributeError):
                parameter.weight_loader = tracer.note
                replaced.append((parameter, loader))
        yield tracer
    finally:
        for parameter, loader in replaced:
            del parameter.weight_loader
            if loader is not None:
                parameter.weight_loader = loader


def partial_loads() -> AbstractContextManager[Any]:
    """A context in which draft models do not require all their tensors, as they do since 0.27."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = disable_mtp_completeness_check()
    return context


def _of_other_stage(name: str, model: Any) -> bool:
    """Whether another pipeline stage has this tensor."""
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    return bool(is_pp_missing_parameter(name, model))


def _storage(tensor: Any) -> int:
    """The same for a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)


def _unchanged(view: Any, sent: Any) -> bool:
    seen, whole = ((t.dtype, t.shape, t.stride()) for t in (view, sent))
    return bool(view.storage_offset() == 0 and seen == whole)


def _located(to: _Loaded, own_loader: Any) -> list[Placement]:
    """Where in a parameter of this layer a load ends up, by the layer's kind."""
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layer = to.layer
    method = type(getattr(layer, "quant_method", None)).__name__
    if method not in UNQUANTIZED:
        raise NotComparable(f"the layer is quantized ({method})")
    if isinstance(layer, RoutedExperts):
        _kind(layer, RoutedExperts)
        return _of_expert(to)
    if isinstance(layer, linear.LinearBase):
        kind = _kind(layer, *(getattr(linear, name) for name in _LINEAR))
        return _LINEAR[kind.__name__](to)
    if isinstance(layer, vocab_parallel_embedding.VocabParallelEmbedding):
        _kind(layer, vocab_parallel_embedding.VocabParallelEmbedding)
        first = layer.shard_indices.org_vocab_start_index
        last = layer.shard_indices.org_vocab_end_index
        return [to.rows(first, last - first)]
    loader = getattr(own_loader, "__name__", "default_weight_loader")
    if loader != "default_weight_loader":
        raise NotComparable(f"{type(layer).__name__} loads it by {loader}")
    return [to.whole()]


def _kind(layer: Any, *kinds: Any) -> Any:
    """The first of `kinds` that the layer is, if it loads as that kind does."""
    for kind in kinds:
        if isinstance(layer, kind):
            for name in ("weight_loader", "weight_loader_v2"):
                if getattr(type(layer), name, None) is not getattr(kind, name, None):
                    break
            else:
                return kind
            break
    raise NotComparable(f"{type(layer).__name__} loads in a way of its own")


def _of_replicated(to: _Loaded) -> list[Placement]:
    return [to.whole()]


def _of_row_parallel(to: _Loaded) -> list[Placement]:
    if len(to.question.shape) == 1:  # every rank has the whole bias
        return [to.whole()]
    size = to.layer.input_size_per_partition
    _expect(to.question.shape[1], to.layer.input_size)
    return [to.columns(to.layer.tp_rank * size, size)]


def _of_column_parallel(to: _Loaded) -> list[Placement]:
    size = to.layer.output_size_per_partition
    _expect(to.question.shape[0], to.layer.output_size)
    return [to.rows(to.layer.tp_rank * size, size)]


def _of_merged(to: _Loaded) -> list[Placement]:
    layer, sizes = to.layer, to.layer.output_sizes
    shards = range(len(sizes)) if to.load.shard is None else to.load.shard
    shards = [shards] if isinstance(shards, int) else list(shards)
    _expect(to.question.shape[0], sum(sizes[shard] for shard in shards))
    places, before = [], 0
    for shard in shards:
        size = sizes[shard] // layer.tp_size
        at = sum(sizes[:shard]) // layer.tp_size
        places.append(to.rows(before + layer.tp_rank * size, size, at))
        before += sizes[shard]
    return places


def _of_qkv(to: _Loaded) -> list[Placement]:
    layer = to.layer
    heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
    kv_rank = layer.tp_rank // layer.num_kv_head_replicas
    parts = (
        ("q", heads * layer.head_size, layer.num_heads * layer.head_size, layer.tp_rank),
        ("k", kv_heads * layer.head_size, layer.num_kv_heads * layer.head_size, kv_rank),
        ("v", kv_heads * layer.v_head_size, layer.num_kv_heads * layer.v_head_size, kv_rank),
    )
    loaded = [part for part in parts if to.load.shard in (None, part[0])]
    _expect(to.question.shape[0], sum(total for _, total, _, _ in loaded))
    places, before, at = [], 0, 0
    for part in parts:
        _, total, size, rank = part
        if part in loaded:
            places.append(to.rows(before + rank * size, size, at))
            before += total
        at += size
    return places


def _of_expert(to: _Loaded) -> list[Placement]:
    """w1 and w3 are halves of w13; ranks share an expert's intermediate size."""
    if len(to.question.shape) != 2 or to.attribute not in ("w13_weight", "w2_weight"):
        raise NotComparable("experts are compared one by one, and without biases")
    layer, attribute, shard = to.layer, to.attribute, to.load.shard
    expert = layer._map_global_expert_id_to_local_expert_id(to.load.expert)
    if expert < 0:
        return []
    parallel = layer.moe_config.moe_parallel_config
    height, width = to.question.matrix
    if shard == "w2":
        size = width // parallel.tp_size
        first = parallel.tp_rank * size
        return [Placement(layer, attribute, 0, first, height, size, expert=expert)]
    size = height // parallel.tp_size
    first = parallel.tp_rank * size
    at = getattr(layer, attribute).shape[1] // 2 if shard == "w3" else 0
    return [Placement(layer, attribute, first, 0, size, width, at, expert=expert)]


def _expect(size: int, expected: int) -> None:
    if size != expected:
        raise NotComparable(f"the layer is made of {expected} rows or columns, not {size}")


# a kind stands before those that it is derived from
_LINEAR = {
    "QKVParallelLinear": _of_qkv,
    "MergedColumnParallelLinear": _of_merged,
    "ColumnParallelLinear": _of_column_parallel,
    "RowParallelLinear": _of_row_parallel,
    "ReplicatedLinear": _of_replicated,
}
