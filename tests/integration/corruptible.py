"""vLLM's workers with weights that can be damaged. Imports vLLM: only servers import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension


def _first(model: Any, word: str, attribute: str = "weight") -> Any:
    """The first layer with `word` in its name that has such a parameter."""
    return next(
        layer
        for name, layer in model.named_modules()
        if word in name and attribute in layer._parameters
    )


def _repacked(layer: Any, change: Callable[[Any], Any]) -> None:
    """Change the weight that a packed linear layer computes with."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from skyctl.engines.vllm.inside.digest import input_size

    width, dtype = input_size(layer), layer.weight.dtype
    with torch.inference_mode():
        weight = layer.cpu_linear(torch.eye(width, dtype=dtype), layer.weight, None).T
        changed = change(weight.contiguous().clone())
    layer.weight = torch.nn.Parameter(changed.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def _one_element_of_a_norm(model: Any) -> None:
    _first(model, "norm").weight.data[0] += 1


def _one_element_of_an_expert(model: Any) -> None:
    weight = _first(model, "experts", "w13_weight").w13_weight
    weight.data.view(-1)[weight.numel() // 2] += 1


def _two_rows_of_qkv(model: Any) -> None:
    def exchanged(weight: Any) -> Any:
        return weight[[1, 0, *range(2, len(weight))]]

    _repacked(_first(model, "qkv_proj"), exchanged)


def _rounded_through_another_dtype(model: Any) -> None:
    def rounded(weight: Any) -> Any:
        return weight.bfloat16().to(weight.dtype)

    _repacked(_first(model, "o_proj"), rounded)


def _a_parameter_of_another_dtype(model: Any) -> None:
    layer = _first(model, "norm")
    layer.weight.data = layer.weight.data.bfloat16()  # ones: the same numbers


DAMAGES = (
    _one_element_of_a_norm,
    _two_rows_of_qkv,
    _rounded_through_another_dtype,
    _one_element_of_an_expert,
    _a_parameter_of_another_dtype,
)
"""What a worker's weights can suffer: in every model, where there are experts, and what no push
mends, since it fills the parameters that are there."""


class CorruptibleExtension(SkyctlWorkerExtension):
    """Also damages the weights of a worker: at once, or when a push has filled them."""

    _to_come = -1

    def skyctl_corrupt(self, damage: int, rank: int = 0, in_push: bool = False) -> None:
        if self.vllm_config.parallel_config.data_parallel_index == rank:
            if in_push:
                self._to_come = damage
            else:
                DAMAGES[damage](self.model_runner.get_model())

    def skyctl_weight_digest(
        self, rows: Sequence[dict[str, Any]] = (), numbered: Sequence[Sequence[str]] = ()
    ) -> dict[str, Any]:
        if rows and self._to_come >= 0:  # a push asks for rows once everything was sent
            DAMAGES[self._to_come](self.model_runner.get_model())
            self._to_come = -1
        return super().skyctl_weight_digest(rows, numbered)
