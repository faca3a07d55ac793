"""Whether a layerwise reload loaded everything: vLLM itself only logs what is missing."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cache, wraps
from typing import Any

from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from skyctl.engines.vllm.inside.experts import tied_layers

try:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
except ImportError:  # vLLM 0.26
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    def is_deferred_attention_layer(layer: Any) -> bool:
        return isinstance(layer, (Attention, MLAAttention))


_UNQUANTIZED = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS = "UnquantizedFusedMoEMethod"
_OF_EXPERTS = {"w13": ("w1", "w3"), "w2": ("w2",)}
"""What parameters of a layer of experts begin with, and the parts that vLLM loads them in."""
_WEIGHTS = ("weight", "weight_packed", "qweight")
"""What such parameters are called further if every checkpoint has them."""
_PROJECTIONS = {
    "w1": "ckpt_gate_proj_name",
    "w2": "ckpt_down_proj_name",
    "w3": "ckpt_up_proj_name",
}
_COUNTING = "online_process_loader"
"""The loader that a session gives to what it waits for (`reload/layerwise.py`)."""
_BIAS = "e_score_correction_bias"
"""What a router adds to the scores of experts. A session loads it in place, and waits for it
nowhere."""
_LOADED = "skyctl_loaded"
"""Whether such a bias was loaded since the session began."""
_SHOWN = 3


def half_open(model: Any) -> bool:
    """Whether an earlier session left layers waiting for weights."""
    return any(get_layerwise_info(layer).can_load() for layer in model.modules())


def watch_biases(model: Any) -> None:
    """Have the biases of routers note that they are loaded; call when a session begins."""
    for _, bias in _uncounted_biases(model):
        if not hasattr(bias, _LOADED):
            bias.weight_loader = _noting(bias)
        setattr(bias, _LOADED, False)


def missing_parameters(model: Any, tied: Container[str] = ()) -> list[str]:
    """Names of layers that still wait for weights, with what lacks of their experts; call before
    the session is finalized.

    Layers that received everything were reset as it arrived. Of the others, attention layers are
    completed at the end, layers of buffers alone keep them, and embeddings padded to a larger
    vocabulary, as well as quantized layers, may stay short of their allocated size. Experts may be
    padded, too: they are told by what was loaded. `tied` layers use what another one loads
    (`engines/vllm/inside/experts.py`). Of biases that lack (`watch_biases`), those that are zero do
    not count: there are models that have one, and checkpoints of them that do not.
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or name in tied:
            continue
        awaited = _awaited(layer._parameters)
        if not awaited:
            continue
        kept = getattr(info, "kernel_non_persistent_buffers", ())  # not in every version
        total = sum(awaited + _awaited(layer._buffers, kept))
        shown = name or type(layer).__name__
        method = _method(layer)
        padded = hasattr(layer, "num_embeddings_padded") or method not in _UNQUANTIZED
        if info.load_numel == 0 or (info.load_numel < total and not padded):
            missing.append(shown)
        elif lacking := _lacking_experts(layer, info.loaded_weights):
            more = f", {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
            missing.append(f"{shown} (no {', '.join(lacking[:_SHOWN])}{more})")
    for name, bias in _uncounted_biases(model):
        lacks = not getattr(bias, _LOADED, True) and bool(bias.any())
        if lacks and name not in tied and name not in missing:
            missing.append(f"{name} (no {_BIAS})")
    return missing


def require_complete(missing: list[str], model_name: str = "the model") -> None:
    """Raise RuntimeError if anything is missing."""
    if missing:
        raise RuntimeError(
            f"{len(missing)} layers of {model_name} got no complete weights: "
            f"{', '.join(missing[:_SHOWN])}"
        )


def watched_load(model: Any) -> list[str]:
    """A list that the model's next `load_weights` fills with what is missing after it: vLLM's own
    reload finalizes the session before anybody can look.
    """
    tied = {name for name, _ in tied_layers(model)}
    missing: list[str] = []

    def load_weights(*arguments: Any, **options: Any) -> Any:
        del model.load_weights  # this one, from before the class's own
        watch_biases(model)
        loaded = model.load_weights(*arguments, **options)
        missing.extend(missing_parameters(model, tied))
        return loaded

    model.load_weights = load_weights
    return missing


def _uncounted_biases(model: Any) -> Iterator[tuple[str, Any]]:
    """Those of routers that no session counts, each once, with the layer that has it."""
    seen: set[int] = set()
    for name, layer in model.named_modules():
        for bias in (layer._parameters.get(_BIAS), layer._buffers.get(_BIAS)):
            if bias is not None and id(bias) not in seen and not _is_counted(bias):
                seen.add(id(bias))
                yield name, bias


def _noting(bias: Any) -> Any:
    """The loader of a bias, which notes on it that it was called."""
    own = getattr(bias, "weight_loader", default_weight_loader)

    @wraps(own)
    def load(*arguments: Any, **options: Any) -> Any:
        setattr(bias, _LOADED, True)
        return own(*arguments, **options)

    return load


def _is_counted(tensor: Any) -> bool:
    """Whether a session waits for it."""
    return getattr(getattr(tensor, "weight_loader", None), "__name__", "") == _COUNTING


def _awaited(tensors: Mapping[str, Any], kept: Container[str] = ()) -> list[int]:
    """The sizes of those that a session waits for and does not keep. vLLM's own count has buffers
    that it keeps, which come from no checkpoint; some parameters it loads at once, uncounted. What
    a model wrote to a buffer by itself is lost in a session, which waits for it in vain.
    """
    return [
        getattr(tensor, "weight_loader_numel", tensor.numel())
        for name, tensor in tensors.items()
        if _is_counted(tensor)
        and (name not in kept or (not tensor.is_inference() and tensor._version))
    ]


def _method(layer: Any) -> str:
    """The class of its `quant_method`; of experts that take adapters, which wrap it, their own."""
    method = getattr(layer, "quant_method", None)
    return type(getattr(method, "old_quant_method", method)).__name__


def _lacking_experts(layer: Any, loads: list[tuple[str, Any]]) -> list[str]:
    """What was not loaded of the experts that this worker holds; of another layer nothing. `loads`:
    vLLM's record of calls of the parameters' loaders.

    Elements cannot tell: backends pad experts, and a rank may have nothing but padding of a part.
    What a model class calls otherwise than w1, w2 or w3 counts for all parts of the parameter.
    """
    if not hasattr(layer, "_map_global_expert_id_to_local_expert_id"):
        return []
    of_layer = _of_all_experts(layer, loads)
    local = cache(layer._map_global_expert_id_to_local_expert_id)
    loaded = set[tuple[str, int, str]]()
    for attribute, call in loads:
        if attribute not in of_layer:
            continue
        parameter, given = of_layer[attribute], call.arguments
        expert, shard = given.get("expert_id"), given.get("shard_id")
        if expert is not None and local(expert) < 0:
            continue  # another rank's
        stacked = _is_stacked(parameter, given)
        places = range(parameter.shape[0]) if stacked else (local(expert),)
        one_part = shard in _parts(attribute) and _kind(attribute) in (*_WEIGHTS, "bias")
        parts = (shard,) if one_part else _parts(attribute)
        loaded |= {(attribute, place, part) for place in places for part in parts}
    gated = getattr(layer.moe_config, "is_act_and_mul", True)
    numbers = {local(expert): expert for expert in range(layer.global_num_experts)}
    return [
        f"{_named(layer, part, attribute)} of expert {numbers.get(place, place)}"
        for attribute, parameter in of_layer.items()
        for place in range(parameter.shape[0])
        for part in _parts(attribute)[: None if gated else 1]
        if (attribute, place, part) not in loaded
    ]


def _of_all_experts(layer: Any, loads: list[tuple[str, Any]]) -> dict[str, Any]:
    """The parameters of a layer that each expert must have.

    A checkpoint may lack what quantizing has beside the weights, have it once for all experts if it
    stacks them, and lack the scales of inputs, which are measured, of some.
    """
    parameters = {n: p for n, p in layer._parameters.items() if p is not None and _parts(n)}
    arrived = {attribute for attribute, _ in loads}
    kinds = {_kind(attribute) for attribute in arrived}.intersection(_WEIGHTS)
    if _method(layer) == _EXPERTS:
        kinds = {"weight", "bias"}
    always = {name: p for name, p in parameters.items() if _kind(name) in kinds}
    if any(n in always and _is_stacked(always[n], call.arguments) for n, call in loads):
        return always
    sizes = {len(parameter) for parameter in always.values()}
    beside = {n: p for n, p in parameters.items() if n in arrived and "input" not in n}
    return always | {n: p for n, p in beside.items() if p.dim() and len(p) in sizes}


def _is_stacked(parameter: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call of a parameter's loader is about all experts."""
    dimensions = given["loaded_weight"].dim()
    stacked = dimensions == parameter.dim() and parameter.dim() > 1
    return stacked or dimensions > 2 or given.get("expert_id") is None


def _kind(attribute: str) -> str:
    """The name of a parameter of experts without what it begins with."""
    return attribute.partition("_")[2]


def _parts(attribute: str) -> tuple[str, ...]:
    return _OF_EXPERTS.get(attribute.partition("_")[0], ())


def _named(layer: Any, part: str, attribute: str) -> str:
    """As the checkpoint calls it."""
    name = getattr(layer, _PROJECTIONS[part], None) or part
    return name if _kind(attribute) in _WEIGHTS else f"{name} {_kind(attribute)}"
