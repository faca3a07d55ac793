"""What a trainer is opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyctl.live.model import MATCH, Names, Pair, Weights
from skyctl.live.offer import GLOO, IPC, NCCL
from skyctl.live.ranks import PATIENCE_S

Transport = Literal["auto", "ipc", "gloo", "nccl"]


@dataclass(frozen=True)
class TrainerOptions:
    """What `Fleet.trainer` was given."""

    weights: Weights
    """The model, a mapping, or a function of slices."""
    names: Names | None = None
    """How the trainer's names become Hugging Face names."""
    dtype: object = MATCH
    """What tensors are sent as."""
    group: Any = None
    """The torch.distributed group of the ranks; None is the default group."""
    patience_s: float = PATIENCE_S
    """How long ranks wait for each other."""
    transport: Transport = "auto"
    """How servers get at the ranks' memory."""


def transport_of(given: Transport, pairs: Sequence[Pair], *, elsewhere: bool) -> str:
    """How servers get at a rank's memory; "" if by a file alone. `elsewhere`: some are on other
    machines.
    """
    on_gpu = any(local.is_cuda for _, local in pairs)
    if given != "auto":
        return given
    if elsewhere:
        return NCCL if on_gpu else GLOO
    return IPC if on_gpu else ""
