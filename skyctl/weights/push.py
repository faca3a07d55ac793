"""The push transaction."""

from __future__ import annotations

from typing import Any

from skyctl.weights.request import (
    PushFleet,
    PushObserver,
    PushRequest,
    PushResult,
    PushServer,
    ServerPush,
)

__all__ = [
    "PushFleet",
    "PushObserver",
    "PushRequest",
    "PushResult",
    "PushServer",
    "ServerPush",
    "push",
]


async def push(
    request: PushRequest, fleet: PushFleet, *, client: Any, observer: PushObserver
) -> PushResult:
    """Push a checkpoint into every server of the fleet."""
    raise NotImplementedError
