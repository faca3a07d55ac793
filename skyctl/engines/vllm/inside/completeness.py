"""Whether a layerwise reload loaded everything: vLLM itself only logs what is missing."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

try:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
except ImportError:  # vLLM 0.26
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    def is_deferred_attention_layer(layer: Any) -> bool:
        return isinstance(layer, (Attention, MLAAttention))


_UNQUANTIZED = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def half_open(model: Any) -> bool:
    """Whether an earlier session left layers waiting for weights."""
    return any(get_layerwise_info(layer).can_load() for layer in model.modules())


def missing_parameters(model: Any, tied: Container[str] = ()) -> list[str]:
    """Names of layers that still wait for weights; call before the session is finalized.

    Layers that received everything were reset as it arrived. Of the others, attention layers are
    completed at the end, buffers come from no checkpoint, and embeddings padded to a larger
    vocabulary, as well as quantized layers, may stay short of their allocated size. `tied` layers
    use what another one loads (`engines/vllm/inside/experts.py`).
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer) or name in tied:
            continue
        if not any(parameter is not None for parameter in layer._parameters.values()):
            continue
        method = type(getattr(layer, "quant_method", None)).__name__
        padded = hasattr(layer, "num_embeddings_padded") or method not in _UNQUANTIZED
        if info.load_numel == 0 or (info.load_numel < info.load_numel_total and not padded):
            missing.append(name or type(layer).__name__)
    return missing
