"""What a weight version's label was given to before."""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.fleet.journal import PushRecord
from skyctl.weights.request import PushRequest


def reused_label(request: PushRequest, pushes: Sequence[PushRecord]) -> str:
    """A warning when the request's label stood for another checkpoint until now, else "".

    `pushes` are newest first.
    """
    label = request.weight_version
    before = next((push for push in pushes if push.ok and push.version == label), None)
    if not label or before is None or before.checkpoint == request.checkpoint:
        return ""
    return (
        f"version {label} was {before.checkpoint} until now ({before.job}); "
        "a label of its own tells the two apart"
    )
