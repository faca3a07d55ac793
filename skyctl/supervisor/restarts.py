"""When a process that died is started again: backoff that doubles, capped, within a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skyctl.fleetfile.schema import RestartPolicy
from skyctl.units import format_seconds


@dataclass(frozen=True)
class Decision:
    """Start again after `wait_s` seconds, or give up because of `why`."""

    restart: bool
    wait_s: float = 0.0
    why: str = ""


def decide(policy: RestartPolicy, restarts: Sequence[float], now: float) -> Decision:
    """What to do about a death at `now`, given the times of earlier restarts (same clock, s)."""
    if policy.policy == "never":
        return Decision(False, why="restart policy is never")
    recent = [at for at in restarts if now - at < policy.window_s]
    if len(recent) >= policy.max_restarts:
        return Decision(
            False,
            why=f"restarted {len(recent)} times within {format_seconds(policy.window_s)}",
        )
    # min() first: 2.0 ** 2000 overflows
    doublings = min(len(recent), 60)
    return Decision(True, min(policy.backoff_s * 2.0**doublings, policy.backoff_max_s))
