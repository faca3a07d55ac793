"""NaN and infinity in tensors where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyctl.wire.finite import all_finite, finite_flags

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2, torch.float8_e8m0fnu]


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counts what torch is told to compute, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Good ones, and with each value that is not finite."""
    values = [torch.ones(2, 3) for _ in range(4)]
    for tensor, bad in zip(values[1:], (float("nan"), float("inf"), -float("inf")), strict=True):
        tensor[1, 2] = bad
    return [tensor.to(dtype) for tensor in values]


def test_tensors_of_all_types_are_told_apart_in_their_order() -> None:
    mixed = [tensor for each in zip(*map(tensors, TYPES), strict=True) for tensor in each]
    mixed.append(torch.tensor(1e300, dtype=torch.float64))
    flags = finite_flags(mixed)
    assert flags == [bool(all_finite(tensor)) for tensor in mixed]
    assert flags[: len(TYPES)] == [True] * len(TYPES) and flags[-1]
    assert not any(flags[len(TYPES) : len(TYPES) + 4])
    assert finite_flags([]) == []


def test_a_model_of_many_tensors_is_an_operation_for_each() -> None:
    many = [torch.ones(3) for _ in range(100)]
    with Operations() as operations:
        assert all(finite_flags(many))
    assert operations.count < 1.2 * len(many)
