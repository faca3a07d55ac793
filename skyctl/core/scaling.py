"""How many replicas a fleet's load needs. Pure: from samples to a count and its reason.

    more than `count` replicas are to have, in all of `up_after_s`      up, to what it needs
    little enough for `count - 1`, in all of `down_after_s`             down by one
    anything else, or the load is not known                             as it is

The two thresholds lie apart (`ROOM`), and a fall takes much longer than a rise to be believed, so a
load that flaps keeps the replicas of its peaks. Demand is that of the whole fleet: it stays
comparable when the count changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from skyctl.core.plan import FleetPlan
from skyctl.core.status import ScalingStatus
from skyctl.engines.base import ServerMetrics
from skyctl.fleetfile.scaling import ScaleSection, Target
from skyctl.store.state import FleetState

ROOM = 0.8
"""Share of the target up to which fewer replicas would be filled."""
_STEPS = 5
"""Parts of `down_after_s`: the load must have been seen in each, and one passes between two steps
down."""
_MISSED = 3
"""So many samples in a row may fail without a gap."""


@dataclass(frozen=True)
class Sample:
    """The load of a fleet at one moment."""

    at: float
    """Seconds on any clock."""
    demand: float
    """In units of the target, over all servers that answered."""
    answered: int
    """How many servers did."""
    missing: str = ""
    """A server of which nothing is known, or that does not serve, and why; "" if all do."""
    starting: int = 0
    """How many will serve soon."""


@dataclass(frozen=True)
class Decision:
    """How many replicas there should be, and why."""

    count: int
    reason: str


def policy_of(plan: FleetPlan | None) -> ScaleSection | None:
    """What says how many replicas there are; None where load does not."""
    return plan.config.scale if plan is not None and plan.router is not None else None


def unmeasured(plan: FleetPlan | None, state: FleetState, count: int) -> ScalingStatus | None:
    """Of `count` replicas whose load is not measured yet; None where load does not decide."""
    if (policy := policy_of(plan)) is None or state.canary() is not None:
        return None
    decision = decide(policy, [], count)
    limits = policy.min, policy.max, policy.target, policy.per_replica
    return ScalingStatus(count, *limits, reason=decision.reason)


def demand_of(target: Target, metrics: ServerMetrics, tokens_s: float) -> float:
    """What the requests of one server need, in units of the target. Its KV cache and its tokens per
    second are bounded by what it has: requests that wait are counted like those that run.
    """
    if target == "queue":
        return float(metrics.in_flight)
    used = metrics.kv_usage if target == "kv" else tokens_s
    return used * metrics.in_flight / metrics.running if metrics.running else used


def kept(policy: ScaleSection, samples: Sequence[Sample]) -> list[Sample]:
    """The samples that the next decision may need."""
    since = samples[-1].at - 2 * max(policy.down_after_s, policy.up_after_s) if samples else 0.0
    return [sample for sample in samples if sample.at >= since]


def decide(
    policy: ScaleSection,
    samples: Sequence[Sample],
    count: int,
    *,
    last_step_down: float = -math.inf,
) -> Decision:
    """The number of replicas from now on, from the samples so far, oldest first. `count` are those
    that serve or will soon.
    """
    if not samples or not samples[-1].answered:
        reason = samples[-1].missing if samples else "not measured yet"
        return Decision(max(count, policy.min), reason)
    latest, limit = samples[-1], policy.per_replica
    load = latest.demand / max(1, count)
    if count < policy.min:
        return Decision(policy.min, f"at least {policy.min}")
    if _exceeds(policy, samples, count * limit):
        needed = max(count, min(policy.max, math.ceil(latest.demand / limit)))
        return Decision(needed, f"{policy.target} {load:.3g} > {limit:g}")
    if latest.missing:
        return Decision(count, latest.missing)
    if count > policy.max:
        return Decision(count - 1, f"at most {policy.max}")
    peak = _most(policy, samples)
    fits = peak <= ROOM * limit * (count - 1)
    rested = latest.at - last_step_down >= policy.down_after_s / _STEPS
    if fits and rested and count > policy.min:
        return Decision(count - 1, f"{policy.target} {load:.3g} of {limit:g}")
    return Decision(count, "")


def _exceeds(policy: ScaleSection, samples: Sequence[Sample], limit: float) -> bool:
    """Whether the demand of all of the last `up_after_s` was above the limit, and does not fall so
    fast that it soon is not. What some servers report is less than what all have. What queued up
    while servers started stays in the queues of the others: it is no reason for still more.
    """
    since = samples[-1].at - policy.up_after_s
    recent = [sample for sample in samples if sample.at >= since]
    seen = [sample for sample in samples if sample.answered]
    if any(sample.starting for sample in recent) or not _covers(policy, seen, since):
        return False
    first, last = next(sample for sample in recent if sample.answered), samples[-1]
    fall = (first.demand - last.demand) * policy.down_after_s / policy.up_after_s
    least = min(sample.demand for sample in recent if sample.answered)
    return least > limit and last.demand - fall > limit


def _most(policy: ScaleSection, samples: Sequence[Sample]) -> float:
    """The most demand of the last `down_after_s`; infinite if not all of it was seen."""
    since = samples[-1].at - policy.down_after_s
    seen = [sample for sample in samples if not sample.missing]
    if not _covers(policy, seen, since):
        return math.inf
    return max(sample.demand for sample in samples if sample.at >= since)


def _covers(policy: ScaleSection, samples: Sequence[Sample], since: float) -> bool:
    """Whether the samples reach back to `since`, each soon enough after the other."""
    times = [sample.at for sample in samples if sample.at >= since]
    times = [sample.at for sample in samples if sample.at < since][-1:] + times
    gap_s = max(_MISSED * policy.interval_s, (samples[-1].at - since) / _STEPS) if samples else 0.0
    gaps = (later - earlier for earlier, later in pairwise(times))
    return bool(times) and times[0] <= since and all(gap <= gap_s for gap in gaps)
