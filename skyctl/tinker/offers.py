"""What this API offers of what a client may ask for; the texts of refusals are for the client."""

from __future__ import annotations

from skyctl.core.tinker import TinkerSettings
from skyctl.tinker import wire
from skyctl.tinker.records import Missing

INSTEAD = "instead of stable_reinforce pass loss_fn=importance_sampling, ppo or cispo"


def check_base(settings: TinkerSettings, name: str) -> None:
    """Raise Missing for another base model."""
    if name != settings.base_model:
        raise Missing(f"base model {name} is not served here; this is: {settings.base_model}")


def check_rank(settings: TinkerSettings, rank: int) -> None:
    """Raise ValueError for a rank that is not offered."""
    if rank == 0 and not settings.full_parameters:
        raise ValueError(
            "rank 0 trains all parameters, which is not offered here "
            "(`tinker: full_parameters` in the fleet file)"
        )
    if not 0 <= rank <= settings.max_rank:
        raise ValueError(
            f"rank {rank} is not offered here: 1 to {settings.max_rank} "
            "(`tinker: max_rank` in the fleet file)"
        )


def check_optimizer(optimizer: wire.Optimizer) -> None:
    """Raise ValueError for another optimizer than AdamW."""
    if optimizer.type != "adamw":
        raise ValueError(f"optimizer {optimizer.type} is not offered here: adamw is")
