"""A group of a trainer's ranks and of servers' workers, which send point to point: over gloo
between CPUs, over NCCL between GPUs.

The trainer's ranks come first, then the workers of each server. They meet in a store that rank 0
serves (`group_store.py`). A group in which a member has failed is of no use any more: its members
leave it, and form another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

Messages = Sequence[tuple[int, torch.Tensor]]
"""Members and flat bytes. Those of one sender arrive in the order in which it sends them."""


@dataclass(frozen=True)
class Meeting:
    """How a member comes to a group."""

    name: str
    """Tells the group from others."""
    transport: str
    """The library: gloo or nccl."""
    host: str
    """Where rank 0 serves the store."""
    port: int
    """The store's."""
    secret: str = field(repr=False)
    """What members know, in hexadecimal digits."""
    members: int
    """How many it has."""
    meet_timeout_s: float
    """How long they wait for each other."""
    transfer_timeout_s: float
    """How long a transfer may take."""

    def to_wire(self) -> dict[str, Any]:
        return {**vars(self)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Meeting:
        """Inverse of `to_wire`; a mapping of another form raises TypeError."""
        return cls(**data)


class PeerGroup(ABC):
    """A group, as one of its members has it. Used by one thread at a time."""

    def context(self) -> AbstractContextManager[Any]:
        """Within it, what is computed from messages, or for them, is in their order."""
        return nullcontext()

    @abstractmethod
    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Send and receive at once. On a GPU it is only enqueued.

        Raises:
            RuntimeError: a member has failed, or took too long.
        """

    def finish(self) -> None:
        """Return once all transfers have ended. Raises as `transfer`."""
        return

    def close(self) -> None:
        """Leave; may be called twice."""
        return
