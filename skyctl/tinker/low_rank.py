"""What an adapter adds to a linear layer, its gradients, and how PEFT describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ALPHA = 32

Parameters = dict[str, Tensor]
"""float32: `<module>.lora_A` of shape (rank, in) and `<module>.lora_B` of shape (out, rank); or
every parameter of the model under its name, tied ones once.
"""


class LowRank(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """`output` + scale · (x Aᵀ) Bᵀ, computed in the base's dtype; gradients of A and B are summed
    in float32. Plain float32 operations would write all of it several times over.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        low = x.flatten(0, -2) @ a.to(x.dtype).T
        ctx.save_for_backward(x, low, a, b)
        ctx.scale = scale
        flat = output.flatten(0, -2)
        return torch.addmm(flat, low, b.to(x.dtype).T, alpha=scale).view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, low, a, b = ctx.saved_tensors
        (gradient,) = gradients
        flat = gradient.flatten(0, -2)
        of_low = ctx.scale * (flat @ b.to(flat.dtype))
        of_x = (of_low @ a.to(flat.dtype)).view_as(x) if ctx.needs_input_grad[1] else None
        of_a, of_b = _summed(of_low.T, x.flatten(0, -2)), ctx.scale * _summed(flat.T, low)
        return gradient, of_x, of_a, of_b, None


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """Their product in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def rank_of(parameters: Mapping[str, Tensor]) -> int:
    """The rank of an adapter; 0 for a whole model."""
    return next((len(value) for name, value in parameters.items() if name.endswith("lora_A")), 0)


def peft_config(parameters: Parameters, base: str) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    modules = {name.rsplit(".", 2)[-2] for name in parameters}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank_of(parameters),
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
