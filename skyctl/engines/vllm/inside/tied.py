"""Output layers that share the embeddings' weight (`tie_word_embeddings`).

A checkpoint has that weight once, under the embeddings' name, so nothing arrives for the output
layer. On a GPU there is nothing to do: both layers read the same memory. On CPU vLLM computes with
a packed copy made when the model was loaded, and keeps using the old one after a reload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def tied_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers whose weight is an earlier layer's, with their names. Not during a reload: layers have
    weights of their own then.
    """
    seen: set[int] = set()
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        if id(weight) in seen:
            yield name, layer
        seen.add(id(weight))


def repack_tied_layers(model: Any) -> None:
    """Renew packed copies of weights that were loaded under another layer's name."""
    for _, layer in tied_layers(model):
        if callable(getattr(layer, "cpu_linear", None)):
            layer.quant_method.process_weights_after_loading(layer)
