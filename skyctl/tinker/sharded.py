"""Whole models whose parameters are divided among the ranks by their rows, with torch's FSDP2.

A rank has its rows in float32 or in the base's dtype. Those of a block are gathered in the base's
dtype while it computes; gradients are added in float32, and each rank gets those of its rows. All
ranks therefore make the same passes at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from skyctl.tinker.ranks import Ranks

T = TypeVar("T")


class ShardedModel(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """A copy of a model without its values: `model`, of which this rank has `shards`."""

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        device: torch.device,
        *,
        dtype: torch.dtype,
        computes_in: torch.dtype,
        trained: bool,
        shared: object,
    ) -> None:
        """Of `dtype` are the rows. What the model's hooks belong to is `shared` with the copy."""
        super().__init__()
        memo: dict[int, Any] = {id(shared): shared}
        for value in model.parameters():
            empty = torch.empty_like(value, dtype=dtype, device="meta")
            memo[id(value)] = torch.nn.Parameter(empty, requires_grad=trained)
        self.model: Any = copy.deepcopy(model, memo)
        self._ranks = ranks
        blocks = set(model._no_split_modules or ())
        modules = [value for value in self.model.modules() if type(value).__name__ in blocks]
        for module in (*modules, self):
            sharded: Any = fully_shard(
                module,
                mesh=DeviceMesh.from_group(dist.group.WORLD, device.type),
                reshard_after_forward=True,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=computes_in, reduce_dtype=torch.float32, cast_forward_inputs=False
                ),
            )
            sharded.set_gradient_divide_factor(1.0)  # the sum, not the mean
            sharded.set_force_sum_reduction_for_comms(True)
        self._apply(
            lambda value: torch.empty_like(value, device=device) if value.is_meta else value
        )
        self.model.to(device)  # its buffers
        named = {name.removeprefix("model."): value for name, value in self.named_parameters()}
        self._named: dict[str, Any] = named
        self.shards = Shards(self, {n: v.detach().to_local() for n, v in self._named.items()})

    def forward(self, compute: Callable[[], T]) -> T:
        """What `compute` returns. Inside it, the parts of the model can be called."""
        return compute()

    def rows(self, name: str) -> slice:
        """The rows of a parameter that this rank has."""
        count = self.count(name)
        share = -(-count // self._ranks.size)
        begin = min(self._ranks.rank * share, count)
        return slice(begin, min(begin + share, count))

    def count(self, name: str) -> int:
        """The rows of a parameter."""
        return int(self._named[name].shape[0])

    def owners(self) -> dict[str, int]:
        """The rank that writes each parameter: by size, evenly."""
        shares = self._ranks.deal([value.numel() for value in self._named.values()])
        names = list(self._named)
        return {names[index]: rank for rank, share in enumerate(shares) for index in share}

    def gathered(self, values: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Of parameters whose rows are divided: those that this rank writes, whole, on the CPU."""
        whole = {}
        for name, owner in self.owners().items():
            value = values[name].to(dtype)
            if value.dim():
                value = self._ranks.gather(value, self.count(name), owner)
            if owner == self._ranks.rank:
                whole[name] = value.cpu()
        return whole

    def drop_gradients(self) -> None:
        """Drop what passes have added."""
        for value in self._named.values():
            value.grad = None

    def take_gradients(self) -> list[Tensor]:
        """What passes have added to this rank's rows, which is dropped here."""
        gradients = [
            torch.zeros_like(self.shards[name]) if value.grad is None else value.grad.to_local()
            for name, value in self._named.items()
        ]
        self.drop_gradients()
        return gradients


class Shards(dict[str, Tensor]):
    """This rank's rows of every parameter, which the module computes with."""

    def __init__(self, module: ShardedModel, rows: Mapping[str, Tensor]) -> None:
        super().__init__(rows)
        self.module = module

    def fill(self, rows_of: Callable[[str, slice], Tensor]) -> None:
        """Give every parameter's rows these values."""
        with torch.no_grad():
            for name, value in self.items():
                value.copy_(rows_of(name, self.module.rows(name)))


def stored(stack: ExitStack, paths: list[Path]) -> dict[str, Callable[[slice | None], Tensor]]:
    """By name, what reads rows (None: all) of the tensors in these files."""
    readers: dict[str, Callable[[slice | None], Tensor]] = {}

    def reader(file: Any, name: str) -> Callable[[slice | None], Tensor]:
        return lambda rows: file.get_tensor(name) if rows is None else file.get_slice(name)[rows]

    for path in paths:
        file = stack.enter_context(safe_open(path, "pt"))
        readers |= {name: reader(file, name) for name in file.keys()}  # noqa: SIM118
    return readers
