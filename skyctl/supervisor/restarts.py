"""When a process that died is restarted: backoff that doubles, capped, within a window."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.fleetfile.sections import RestartPolicy
from skyctl.store.state import FleetState
from skyctl.units import format_seconds


@dataclass(frozen=True)
class Decision:
    """Restart after `wait_s` seconds, or give up because of `reason`."""

    restart: bool
    wait_s: float = 0.0
    reason: str = ""


def decide(policy: RestartPolicy, restarts: Sequence[float], now: float) -> Decision:
    """What to do about a death at `now`, given the times of earlier restarts (same clock, s)."""
    if policy.policy == "never":
        return Decision(False, reason="restart policy is never")
    recent = [at for at in restarts if now - at < policy.window_s]
    if len(recent) >= policy.max_restarts:
        return Decision(
            False,
            reason=f"restarted {len(recent)} times within {format_seconds(policy.window_s)}",
        )
    # min() first: 2.0 ** 2000 overflows
    doublings = min(len(recent), 60)
    return Decision(True, min(policy.backoff_s * 2.0**doublings, policy.backoff_max_s))


_KEY = "restarts"


def remembered(state: FleetState, name: str, now: float) -> tuple[list[float], str]:
    """When a child was restarted, on the clock that reads `now`, and why the last time."""
    with state.understanding():
        entry = _all(state).get(name, {"at": [], "why": ""})
        passed = time.time() - now
        return [at - passed for at in entry["at"]], entry["why"]


def remember(state: FleetState, name: str, reason: str) -> None:
    """Record a restart at the present time."""
    with state.understanding(), state.transaction():
        restarts = _all(state)
        at = restarts.get(name, {"at": []})["at"]
        state.set(_KEY, json.dumps({**restarts, name: {"at": [*at, time.time()], "why": reason}}))


def forget(state: FleetState, name: str) -> None:
    """Count from 0 again: it was stopped on purpose."""
    with state.understanding(), state.transaction():
        restarts = _all(state)
        if restarts.pop(name, None) is not None:
            state.set(_KEY, json.dumps(restarts))


def _all(state: FleetState) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(state.get(_KEY) or "{}")
    return recorded
