"""Results of verbs that the state file holds; only commands that ask for them load them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyctl.store.journal import PushRecord
from skyctl.store.kept_weights import KeptWeights
from skyctl.store.processes import ProcessRow
from skyctl.store.state import ServerRow


@dataclass(frozen=True)
class WeightsState:
    """What each server carries, as the last push recorded it, and the pushes, newest first.
    `base` is the directory that servers are started with, None if that is not known.
    """

    servers: tuple[ServerRow, ...]
    pushes: tuple[PushRecord, ...]
    base: str | None = None
    base_digest: str | None = None
    """The identity of that directory's files when the fleet came up, None if it is not known."""

    @property
    def version(self) -> str | None:
        """The version that every server has, "base" for what they were started with; None while
        they differ.
        """
        versions = {row.weight_version or "base" for row in self.servers}
        return versions.pop() if len(versions) == 1 else None


@dataclass(frozen=True)
class KeptVersion:
    """`current`: the fleet, or one of its servers, runs it. `exists`: its copy does."""

    kept: KeptWeights
    current: bool
    exists: bool

    def to_json(self) -> dict[str, Any]:
        return {**self.kept.to_json(), "current": self.current, "there": self.exists}


@dataclass(frozen=True)
class Processes:
    """Recorded child processes, their present or planned ports, and whether the fleet goes down."""

    rows: tuple[ProcessRow, ...] = ()
    ports: dict[str, int] = field(default_factory=dict)
    going_down: bool = False
    pins: dict[str, str] = field(default_factory=dict)
    """What the fleet's models mean until it goes down (`core/pinning.py`)."""
