"""Models that vLLM's updates would leave wrong: experts on CPU, and layers with another's weight.

vLLM computes with a packed copy of the experts, which it makes when it builds the layer's kernel.
An update finds the kernel in place and copies what arrived, unpacked, to where the packed copy is
(vLLM 0.32, `unquantized_fused_moe_method.py`, `_setup_kernel`): tokens are wrong from then on, and
no error is raised. This applies to every update, vLLM's own `reload_weights` included.

Of an output layer that shares the embeddings' weight (`tie_word_embeddings`), a checkpoint has that
weight once, under the embeddings' name, so nothing arrives for the output layer. On a GPU there is
nothing to do: both layers read the same memory. On CPU vLLM computes with a packed copy made when
the model was loaded, and keeps using the old one after a reload.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

_PACKING = "process_weights_after_loading"
_MARK = "packs_after_updates"


def pack_after_updates() -> None:
    """Make vLLM pack experts in updates too, in this process. May be called more than once; must
    come before the first update. A no-op if this vLLM has no such method.
    """
    try:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
            UnquantizedFusedMoEMethod,
        )
    except ImportError:
        return
    complete_packing(UnquantizedFusedMoEMethod)


def complete_packing(method: Any) -> None:
    """Make `method`, a class of vLLM's, pack after every load: call the kernel's own packing where
    an update ends without it.
    """
    process = getattr(method, _PACKING)
    if getattr(process, _MARK, False):
        return

    @wraps(process)
    def process_and_pack(self: Any, layer: Any) -> None:
        kernel = getattr(self, "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not hasattr(experts, _PACKING):
            process(self, layer)
            return
        pack, packed = getattr(experts, _PACKING), list[Any]()

        def watch(loaded: Any) -> None:
            packed.append(loaded)
            pack(loaded)

        setattr(experts, _PACKING, watch)
        try:
            process(self, layer)
        finally:
            delattr(experts, _PACKING)
        # a new kernel was made for packed weights, or has packed them
        if self.moe_kernel is kernel and not packed:
            pack(layer)

    setattr(process_and_pack, _MARK, True)
    setattr(method, _PACKING, process_and_pack)


def update_problem(model: Any) -> str:
    """Why an update would fail, or leave this model with wrong experts; "" if it would not.

    On accelerators vLLM keeps experts in a form that its updates restore. Layers that take adapters
    wrap those that the checkpoint names, which vLLM 0.26 does not look into.
    """
    for name, layer in model.named_modules():
        if "base_layer" in layer._modules and not hasattr(type(layer), "load_weights"):
            return f"{name}: this vLLM loads no weights into layers that take LoRA adapters"
        weight = layer._parameters.get("w13_weight")
        if weight is None or weight.device.type != "cpu":
            continue
        method = layer.quant_method
        if not getattr(getattr(type(method), _PACKING), _MARK, False):
            return (
                f"{name}: an update would leave its experts unpacked ({type(method).__name__} on "
                "CPU, which skyctl cannot complete)"
            )
        if not hasattr(getattr(method.moe_kernel, "fused_experts", None), _PACKING):
            return f"{name}: this vLLM packs experts on CPU in a way that skyctl does not know"
    return ""


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
