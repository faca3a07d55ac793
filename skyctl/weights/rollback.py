"""Which weights came before those that a fleet has now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyctl.errors import NotFoundError, PreflightError
from skyctl.fleet.journal import PushRecord
from skyctl.weights.checkpoint import Checkpoint
from skyctl.weights.request import PushRequest


def rollback(request: PushRequest, pushes: Sequence[PushRecord]) -> PushRequest:
    """`request` for the version before the current one; `pushes` are newest first.

    Rolled back twice, a fleet is where it was: the version that was left is then the one before.

    Raises:
        NotFoundError: no other version was ever pushed.
    """
    done = [push for push in pushes if push.ok]
    before = next((push for push in done if push.version != done[0].version), None)
    if before is None:
        have = f"{done[0].version} is the only version that was pushed" if done else "no push yet"
        raise NotFoundError(
            f"there is nothing to roll back to: {have}",
            hint="push the checkpoint that you want by its path: skyctl sync-weights CKPT",
        )
    return replace(
        request,
        checkpoint=before.checkpoint,
        weight_version=before.version,
        expected_digest=before.checkpoint_digest,
    )


def refuse_changed(request: PushRequest, checkpoint: Checkpoint) -> None:
    """A version means certain bytes.

    Raises:
        PreflightError: the files are not those that were pushed under this version.
    """
    if request.expected_digest and request.expected_digest != checkpoint.identity_digest:
        raise PreflightError(
            f"{checkpoint.path} was written anew since it was pushed as {request.weight_version}",
            hint="push it as what it is now: skyctl sync-weights " + str(checkpoint.path),
        )
