"""A push whose checkpoint the fleet keeps: copied first, pushed from the copy, then recorded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.checkpoints.keeping import delete_copy, keep_copy, mark_recorded
from skyctl.children import to_its_end
from skyctl.core.repeated import needed
from skyctl.errors import ConflictError
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.source import refuse_changed
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.kept_weights import KeptWeights, kept_weights, remember
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState

_SHARED_DIR = "shared_dir"
"""Where the state keeps `shared_dir` as the fleet file has it."""


@dataclass
class Keeping:
    """`request` is what to push: from the copy, once there is one."""

    request: PushRequest
    state: FleetState
    source: Checkpoint | None = None
    copy: Checkpoint | None = None

    def record(self, result: PushResult) -> None:
        """The push succeeded: what was pushed stays."""
        self._remember(FleetWeights.pushed(result.to_json()))

    def record_used(self) -> bool:
        """The push succeeded on some servers only: they run the copy, so it stays as well."""
        used = self.copy is not None and str(self.copy.path) in self.state.checkpoints()
        paths = [kept.checkpoint for kept in kept_weights(self.state)] if used else []
        if used and self.request.checkpoint not in paths:
            self._remember(replace(self.state.weights(), content_digest=""))
        return used

    def _remember(self, weights: FleetWeights) -> None:
        if self.source is None or self.copy is None:
            return
        kept = KeptWeights(
            version=weights.version or self.request.checkpoint,
            checkpoint=str(self.copy.path),
            source=str(self.source.path),
            checkpoint_digest=self.copy.identity_digest,
            source_digest=self.source.identity_digest,
            content_digest=weights.content_digest,
            bytes=self.copy.total_bytes,
            at=time.time(),
            draft=weights.draft,
            draft_digest=weights.draft_digest,
        )
        remember(self.state, kept)
        mark_recorded(self.copy.path)


@asynccontextmanager
async def keeping(
    request: PushRequest, directory: Path, state: FleetState
) -> AsyncIterator[Keeping]:
    """Yields what to push instead of the request; a copy that no server runs afterwards is removed.
    Weights that are in no file are copied after the push.

    The push must be on record, whatever its outcome, before the block ends.

    Raises:
        PreflightError, SkyctlError: it cannot be kept; nothing was touched.
    """
    if not request.keep or request.dry_run or not request.checkpoint:
        yield Keeping(request, state)
        return
    source = await asyncio.to_thread(read_checkpoint, request.checkpoint)
    await asyncio.to_thread(refuse_changed, request, source)
    recorded = kept_weights(state)
    existing = next((kept for kept in recorded if _same(kept, source)), None)
    if existing is not None:
        copy = Path(existing.checkpoint)
    else:
        # also what a push that died left unrecorded, and the fleet runs, or recovery will push
        copies = {kept.checkpoint for kept in recorded} | state.checkpoints() | needed(state)
        stop = threading.Event()
        copy = await to_its_end(
            asyncio.to_thread(keep_copy, source, directory, copies, stop=stop),
            stop.set,
            undo=lambda copied: asyncio.to_thread(delete_copy, copied, directory),
        )
    # the copy has an identity of its own; the source's has been checked
    request = replace(request, checkpoint=str(copy), expected_digest=None, expected_content=None)
    own = Keeping(request, state, source)
    try:
        own.copy = await asyncio.to_thread(read_checkpoint, str(copy))
        yield own
    finally:
        if existing is None and not own.record_used():
            await asyncio.to_thread(delete_copy, copy, directory)


def _same(kept: KeptWeights, source: Checkpoint) -> bool:
    """Whether these files are already kept, and the copy is intact."""
    if str(source.path) == kept.checkpoint:
        return source.identity_digest == kept.checkpoint_digest
    if source.identity_digest != kept.source_digest or not Path(kept.checkpoint).is_dir():
        return False
    return read_checkpoint(kept.checkpoint).identity_digest == kept.checkpoint_digest


def place_copies(paths: FleetPaths, state: FleetState, shared_dir: str | None) -> None:
    """Keep the fleet's copies of weights below the directory that `shared_dir` leads to when it is
    first taken: its links may move. None: in the fleet's own directory.

    Raises:
        ConflictError: there are some elsewhere.
    """
    before = paths.shared
    place = Path(shared_dir).resolve() if shared_dir else None
    as_before = before is not None and shared_dir == state.get(_SHARED_DIR)
    if as_before or place == (before and before.parent):
        return
    where = before or paths.directory
    if state.processes():
        raise ConflictError(
            f"the fleet's servers read its copies of weights in {where}",
            hint="bring it down before you change `shared_dir`: skyctl down && skyctl up",
        )
    if kept := kept_weights(state):
        raise ConflictError(
            f"the fleet keeps {', '.join(weights.version for weights in kept)} in {where}",
            hint="before you change `shared_dir`: skyctl weights forget VERSION",
        )
    paths.share(place)
    state.set(_SHARED_DIR, shared_dir or "")
