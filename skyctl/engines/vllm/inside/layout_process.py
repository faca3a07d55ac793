"""Parameters that a layer makes of its loaded weight, such as FP8 of bfloat16: they are made in
spare memory while the model serves, so that the freeze only copies them.

A layer's own quantization method makes them, on a stand-in that shares only the settings of the
running layer. The result equals what vLLM's loader would have made: a push relies on that only in a
process where the two were compared (`layout_load.py`). Read in vLLM 0.32 and 0.33
(`model_loader/reload/layerwise.py`, `layers/quantization/online/fp8.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

_METHODS = {
    "Fp8PerTensorOnlineLinearMethod",
    "Fp8PerBlockOnlineLinearMethod",
    "Fp8PtpcOnlineLinearMethod",
}
_PROCESSED_ONCE = "_already_called_process_weights_after_loading"


def unprocessed(layer: Any) -> torch.Tensor | None:
    """The weight that a layer is loaded with, empty and on the meta device; None for a layer that
    keeps it as it is, or cannot be processed twice.
    """
    method = getattr(layer, "quant_method", None)
    if method is None or type(method).__name__ not in _METHODS:
        return None
    if method.requantization_source is not None:
        return None
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, _ = get_layerwise_info(layer).restore_metadata
    return parameters["weight"] if list(parameters) == ["weight"] else None


def layers(model: Any) -> dict[str, Any]:
    """The layers that can be processed beside the running ones, by the name of their weight."""
    return {
        f"{path}.weight": module
        for path, module in model.named_modules()
        if unprocessed(module) is not None
    }


def products(layer: Any) -> dict[str, torch.Tensor]:
    """What a layer has made of its weight, by name."""
    return {
        name: parameter.data
        for name, parameter in layer._parameters.items()
        if parameter is not None and name != "bias"
    }


def spare_bytes(model: Any) -> int:
    """Bytes it takes to process all layers of a model beside the running ones: all that they make,
    and the weight of the largest.
    """
    made = largest = 0
    for layer in model.modules():
        if (weight := unprocessed(layer)) is not None:
            made += sum(tensor.nbytes for tensor in products(layer).values())
            largest = max(largest, weight.nbytes)
    return made + largest


def empty_weight(layer: Any, device: torch.device) -> torch.Tensor:
    """Memory for the weight that one of `layers` is loaded with, with vLLM's attributes of it."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    weight = unprocessed(layer)
    assert weight is not None
    with device:
        return materialize_meta_tensor(weight)


def process(layer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one of `layers` makes of a weight; the layer itself is unchanged. Raises RuntimeError:
    it differs in form from what the running layer has.
    """
    stand_in = copy.copy(layer)
    stand_in._parameters = {"weight": _alias(weight), "bias": layer._parameters.get("bias")}
    stand_in._buffers = dict(layer._buffers)
    stand_in.__dict__.pop(_PROCESSED_ONCE, None)
    # both may keep state
    method = stand_in.quant_method = copy.copy(layer.quant_method)
    method.fp8_linear = copy.copy(method.fp8_linear)
    with torch.no_grad():
        method.process_weights_after_loading(stand_in)
    made = products(stand_in)
    if _form(made) != _form(products(layer)) or _buffers(stand_in) != _buffers(layer):
        raise RuntimeError(f"{type(layer).__name__} makes something else than it has")
    return made


def _alias(weight: torch.Tensor) -> torch.Tensor:
    """Another parameter of the same memory: from 0.33 on vLLM puts what a layer makes of its weight
    into the parameter itself (`replace_parameter`).
    """
    alias = weight.data.detach()
    alias.__class__ = weight.__class__
    alias.__dict__ = weight.__dict__.copy()
    return alias


def _form(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    return {n: (t.dtype, tuple(t.shape), t.stride()) for n, t in tensors.items()}


def _buffers(module: Any) -> dict[str, int]:
    return {name: id(buffer) for name, buffer in module._buffers.items()}
