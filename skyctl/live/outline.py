"""What a trainer's pushes are going to do, known before the first: who sends what, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyctl.live.blocks import Block


@dataclass(frozen=True)
class RankShare:
    """What one rank sends in each push."""

    rank: int
    pieces: int
    nbytes: int


@dataclass(frozen=True)
class Outline:
    """The plan of a trainer's pushes. Sizes in bytes, as they are sent."""

    way: str
    """How weights leave the trainer's memory: "file" is a checkpoint in memory that all ranks
    write."""
    reason: str
    """Why it was chosen."""
    tensors: int
    """How many the servers get."""
    total_bytes: int
    """Their size."""
    memory_bytes: int
    """What is taken beside the weights, at most, while the trainer is open."""
    ranks: tuple[RankShare, ...]
    """The share of each rank."""
    transport: str = ""
    """How they get to servers, if no file has them: "ipc", "gloo" or "nccl"."""

    @property
    def balance(self) -> float:
        """The largest share over the mean: 1 if all ranks send the same."""
        sizes = [share.nbytes for share in self.ranks]
        return max(sizes) * len(sizes) / total if (total := sum(sizes)) else 1.0

    def to_json(self) -> dict[str, Any]:
        """JSON mapping with one key per field, and `balance`."""
        return {**asdict(self), "ranks": [asdict(r) for r in self.ranks], "balance": self.balance}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outline:
        """Inverse of `to_json`."""
        fields = {key: value for key, value in data.items() if key != "balance"}
        return cls(**{**fields, "ranks": tuple(RankShare(**row) for row in data["ranks"])})


def shares_of(chosen: Sequence[Sequence[Block]]) -> tuple[RankShare, ...]:
    """Of the blocks that each rank sends."""
    return tuple(
        RankShare(rank, len(blocks), sum(block.nbytes for block in blocks))
        for rank, blocks in enumerate(chosen)
    )
