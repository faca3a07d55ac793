"""The versions that a fleet keeps: which there are, and forgetting one. Also while it is down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyctl.core.registry import FleetRef
from skyctl.errors import ConflictError, NotFoundError
from skyctl.store.kept_weights import KeptWeights, forget, kept_weights
from skyctl.store.state import FleetState


@dataclass(frozen=True)
class KeptVersion:
    """`current`: the fleet, or one of its servers, runs it. `there`: its copy is."""

    kept: KeptWeights
    current: bool
    there: bool

    def to_json(self) -> dict[str, Any]:
        return {**self.kept.to_json(), "current": self.current, "there": self.there}


def kept_versions(ref: FleetRef) -> list[KeptVersion]:
    """Newest first; [] for a fleet that was never started."""
    if not ref.paths.database.exists():
        return []
    with FleetState(ref.paths.database) as state:
        used = state.checkpoints()
        return [
            KeptVersion(one, one.checkpoint in used, Path(one.checkpoint).is_dir())
            for one in kept_weights(state)
        ]


def forget_version(ref: FleetRef, version: str) -> int:
    """Delete the copies of a version; the bytes of weights that were in them.

    Raises:
        NotFoundError: it is not kept.
        ConflictError: the fleet runs it, or a push is in progress.
        UsageError: `version` may be any of several.
    """
    from skyctl.checkpoints.keeping import delete_copy
    from skyctl.core.arbiter import Act, Arbiter
    from skyctl.push.labels import meant

    versions = kept_versions(ref)
    version = meant(version, (one.kept.version for one in versions))
    found = [one for one in versions if one.kept.version == version]
    if not found:
        names = ", ".join(one.kept.version for one in versions) or "none"
        raise NotFoundError(
            f"version {version} is not kept by fleet {ref.name}", hint=f"kept versions: {names}"
        )
    with (
        FleetState(ref.paths.database) as state,
        Arbiter(state.locks).take(Act.PUSH, "skyctl weights forget"),
    ):
        if any(one.kept.checkpoint in state.checkpoints() for one in found):
            raise ConflictError(
                f"fleet {ref.name} runs {version}: a replica that restarts needs it",
                hint="push another version first",
            )
        gone = forget(state, version)
        for one in gone:
            delete_copy(Path(one.checkpoint), ref.paths.kept)
    return sum(one.bytes for one in gone)
