"""A push whose checkpoint the fleet keeps: copied first, pushed from the copy, then on record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.checkpoints.keeping import delete_copy, keep_copy
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.rollback import refuse_changed
from skyctl.store.kept_weights import KeptWeights, kept_weights, remember
from skyctl.store.state import FleetState


@dataclass
class Keeping:
    """`request` is what is to be pushed: from the copy, once there is one."""

    request: PushRequest
    source: Checkpoint | None = None
    copied: bool = False

    def record(self, state: FleetState, result: PushResult) -> None:
        """The push went well: what was pushed stays."""
        if self.source is None:
            return
        kept = KeptWeights(
            version=result.version,
            checkpoint=result.checkpoint,
            source=str(self.source.path),
            checkpoint_digest=result.checkpoint_digest,
            source_digest=self.source.identity_digest,
            content_digest=result.content_digest,
            bytes=result.total_bytes,
            at=time.time(),
        )
        remember(state, kept)
        self.copied = False  # it is on record: not ours to remove


@asynccontextmanager
async def keeping(
    request: PushRequest, directory: Path, state: FleetState
) -> AsyncIterator[Keeping]:
    """What to push instead of the request; a copy whose push failed is removed at the end.

    Raises:
        PreflightError, SkyctlError: it cannot be kept; nothing was touched.
    """
    if not request.keep or request.dry_run:
        yield Keeping(request)
        return
    source = await asyncio.to_thread(read_checkpoint, request.checkpoint)
    refuse_changed(request, source)
    known = kept_weights(state)
    found = next((one for one in known if _same(one, source)), None)
    if found is not None:
        copy = Path(found.checkpoint)
    else:
        copies = {one.checkpoint for one in known}
        copy = await asyncio.to_thread(keep_copy, source, directory, copies)
    own = Keeping(
        # the copy has an identity of its own; that of the source was looked at
        replace(request, checkpoint=str(copy), expected_digest=None),
        source,
        copied=found is None,
    )
    try:
        yield own
    finally:
        if own.copied:
            await asyncio.to_thread(delete_copy, copy, directory)


def _same(kept: KeptWeights, source: Checkpoint) -> bool:
    """Whether these files are kept already, and the copy is what it was."""
    if str(source.path) == kept.checkpoint:
        return source.identity_digest == kept.checkpoint_digest
    if source.identity_digest != kept.source_digest or not Path(kept.checkpoint).is_dir():
        return False
    return read_checkpoint(kept.checkpoint).identity_digest == kept.checkpoint_digest
