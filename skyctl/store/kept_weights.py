"""Records of the checkpoints that a fleet keeps as its own (`sync-weights --keep`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyctl.store.state import FleetState

KEY = "kept_weights"


@dataclass(frozen=True)
class KeptWeights:
    """One version that the fleet keeps."""

    version: str
    """Its label."""
    checkpoint: str
    """The fleet's own copy."""
    source: str
    """The directory it was made from."""
    checkpoint_digest: str
    """The copy's identity."""
    source_digest: str
    """The identity of the source when it was copied."""
    content_digest: str
    """Covers every byte that was pushed; "" if nothing was sent."""
    bytes: int
    """The size of the copy."""
    at: float
    """When it was kept, in epoch seconds."""
    draft: str = ""
    """The directory of the model that servers drafted tokens with, which is not copied."""
    draft_digest: str = ""
    """The identity of that model's files when they were pushed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def kept_weights(state: FleetState) -> list[KeptWeights]:
    """Every version that is kept, newest first."""
    with state.understanding():
        return [KeptWeights(**row) for row in json.loads(state.get(KEY) or "[]")]


def remember(state: FleetState, kept: KeptWeights) -> None:
    """Record a kept version; one of the same version and copy is replaced."""
    with state.transaction():
        others = [
            other
            for other in kept_weights(state)
            if (other.version, other.checkpoint) != (kept.version, kept.checkpoint)
        ]
        _save(state, [kept, *others])


def forget(state: FleetState, version: str) -> list[KeptWeights]:
    """Take a version off the list; returns copies no longer used (a copy may have two names)."""
    with state.transaction():
        recorded = kept_weights(state)
        remaining = [kept for kept in recorded if kept.version != version]
        _save(state, remaining)
    still = {kept.checkpoint for kept in remaining}
    return [kept for kept in recorded if kept.version == version and kept.checkpoint not in still]


def _save(state: FleetState, kept: list[KeptWeights]) -> None:
    state.set(KEY, json.dumps([version.to_json() for version in kept]))
