"""What is established after each phase of a push (`push/transaction.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from skyctl.push.check import Checked
from skyctl.push.way import Delivery


@dataclass(frozen=True)
class Staged:
    """The weights are where they can be ahead of the freeze; no server was touched."""

    checked: Checked
    delivery: Delivery


@dataclass(frozen=True)
class Frozen(Staged):
    """Every server is paused with an update open, and the journal says that bytes follow."""


@dataclass(frozen=True)
class Delivered(Staged):
    """Each server holds all of the weights, or its record says why not."""

    label: str
    """The version that the servers get."""

    @property
    def content_digest(self) -> str:
        """Over every byte that was sent; "" for ways in which skyctl sends none."""
        return self.delivery.content_digest


@dataclass(frozen=True)
class Verified(Delivered):
    """Each server holds what was sent, and the same as the others, or its record says why not."""
