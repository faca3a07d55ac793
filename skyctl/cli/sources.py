"""What the checkpoint or adapter that was typed means on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef, RemoteRef


def stored_directory(source: str) -> str:
    """The directory that a `tinker://` path means on this machine; anything else as it is.

    Raises:
        NotFoundError: no Tinker API of this machine has such a checkpoint.
    """
    if not source.startswith("tinker://"):
        return source
    from skyctl.tinker.stored import find_checkpoint

    return str(find_checkpoint(source).directory)


def checkpoint_path(ref: FleetRef | RemoteRef, checkpoint: str) -> str:
    """The checkpoint, absolute for a fleet of this machine; otherwise as typed.

    Raises:
        NotFoundError: there is nothing by that name on this machine.
    """
    from skyctl.checkpoints.checkpoint import absolute
    from skyctl.core.registry import FleetRef

    return absolute(stored_directory(checkpoint)) if isinstance(ref, FleetRef) else checkpoint
