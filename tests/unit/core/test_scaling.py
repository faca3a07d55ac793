"""How many replicas a load needs: rules one by one, and hours of traces in a simulated fleet."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from benchmarks.scaling import HOUR_S, POLICY, TRACES, Fleet, best_fixed
from skyctl.core.scaling import Decision, Sample, decide, demand_of, kept, unmeasured
from skyctl.core.status import ScalingStatus
from skyctl.engines.base import ServerMetrics
from skyctl.fleetfile.scaling import ScaleSection, Target
from skyctl.store.fleet_weights import Canary, CanaryStage, FleetWeights
from skyctl.store.state import FleetState
from tests.unit.core.plans import plan

QUICK = ScaleSection(min=1, max=8, target="queue", value=10, up_after_s=15, down_after_s=100)


def seen(
    demand: float, seconds: int = 200, *, missing: str = "", until: float = 1000
) -> list[Sample]:
    """One demand, measured each 5 s."""
    answered = 0 if missing else 2
    return [Sample(until - back, demand, answered, missing) for back in range(seconds, -1, -5)]


@pytest.mark.parametrize(
    ("samples", "count", "expected"),
    [
        ([], 2, Decision(2, "not measured yet")),
        (seen(20), 2, Decision(2, "")),
        (seen(21), 2, Decision(3, "queue 10.5 > 10")),
        (seen(64), 2, Decision(7, "queue 32 > 10")),  # at once to what it needs
        (seen(1000), 2, Decision(8, "queue 500 > 10")),
        (seen(1000), 8, Decision(8, "queue 125 > 10")),
        (seen(8), 2, Decision(1, "queue 4 of 10")),
        (seen(8.1), 2, Decision(2, "")),  # the other would be filled to more than 80 %
        (seen(0), 5, Decision(4, "queue 0 of 10")),  # one at a time
        (seen(0), 1, Decision(1, "")),
        (seen(0), 9, Decision(8, "at most 8")),
        (seen(0), 0, Decision(1, "at least 1")),
        (seen(500, 10), 2, Decision(2, "")),  # not for long enough
        (seen(0, 90), 2, Decision(2, "")),
        (seen(5, 100) + seen(500, 10, until=1010), 2, Decision(2, "")),
        (seen(500, 10, until=900) + seen(5, 95), 2, Decision(2, "")),  # a peak in the window
    ],
)
def test_a_decision_from_what_was_seen(
    samples: list[Sample], count: int, expected: Decision
) -> None:
    assert decide(QUICK, samples, count) == expected


def test_a_load_that_is_not_known_removes_nothing() -> None:
    silent = "the load of a is not known"
    assert decide(QUICK, seen(0, missing=silent), 3) == Decision(3, silent)
    assert decide(QUICK, seen(0), 0, last_step_down=0).count == 1
    # nor does what some know while others are silent
    last = dataclasses.replace(seen(0)[-1], answered=1, missing=silent)
    assert decide(QUICK, [*seen(0)[:-1], last], 3) == Decision(3, silent)
    # nor what was known only before, and after, a gap
    gap = [sample for sample in seen(0) if not 930 < sample.at < 990]
    assert decide(QUICK, gap, 3) == Decision(3, "")
    # and of more than `max`, none goes unknown
    assert decide(QUICK, seen(0, missing=silent), 9).count == 9


def test_what_some_servers_report_is_enough_to_add_others() -> None:
    samples = [
        dataclasses.replace(sample, answered=1, missing="b is unreachable") for sample in seen(64)
    ]
    assert decide(QUICK, samples, 2).count == 7


def test_steps_down_keep_a_distance() -> None:
    assert decide(QUICK, seen(0), 5, last_step_down=985).count == 5
    assert decide(QUICK, seen(0), 5, last_step_down=980).count == 4


def test_a_queue_that_shrinks_fast_enough_adds_nothing() -> None:
    def falling(per_s: float) -> list[Sample]:
        return [Sample(sample.at, 400 - per_s * (sample.at - 985), 2) for sample in seen(0, 20)]

    assert decide(QUICK, falling(5), 2).count == 2
    assert decide(QUICK, falling(1), 2).count == 8


def test_while_servers_start_no_more_are_added() -> None:
    samples = seen(500)
    starting = [
        dataclasses.replace(sample, starting=2 if sample.at <= 990 else 0) for sample in samples
    ]
    assert decide(QUICK, starting, 4).count == 4  # one of them has served for 10 s
    later = [*starting, *seen(500, 10, until=1010)]
    assert decide(QUICK, later, 4).count == 8


@pytest.mark.parametrize(
    ("target", "metrics", "tokens_s", "demand"),
    [
        ("queue", ServerMetrics(running=3, waiting=4), 0.0, 7),
        ("kv", ServerMetrics(running=4, kv_usage=0.5), 0.0, 0.5),
        ("kv", ServerMetrics(running=4, waiting=12, kv_usage=0.9), 0.0, 3.6),
        ("kv", ServerMetrics(waiting=3, kv_usage=0.9), 0.0, 0.9),
        ("tokens", ServerMetrics(running=4, waiting=4), 800.0, 1600),
    ],
)
def test_what_waits_counts_like_what_runs(
    target: Target, metrics: ServerMetrics, tokens_s: float, demand: float
) -> None:
    assert demand_of(target, metrics, tokens_s) == pytest.approx(demand)


def test_only_the_samples_of_two_windows_are_kept() -> None:
    samples = seen(1, 1000)
    assert kept(QUICK, samples) == [sample for sample in samples if sample.at >= 800]
    assert kept(QUICK, []) == []


# --- hours in a simulated fleet -------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_an_hour_serves_every_request_without_flapping(name: str) -> None:
    outcome = Fleet(POLICY.min, POLICY).run(TRACES[name])
    assert outcome.unserved == 0
    assert POLICY.min <= min(outcome.counts) and max(outcome.counts) <= POLICY.max
    # a turn from up to down takes `down_after_s` of less load
    assert outcome.turns <= 2 * HOUR_S / POLICY.down_after_s
    downs = [step for step in outcome.steps if step < 0]
    assert all(step == -1 for step in downs)
    assert len(downs) <= HOUR_S / (POLICY.down_after_s / 5)


@pytest.mark.parametrize("period_s", [10, 60, 200])
def test_a_load_that_flaps_faster_than_the_window_keeps_the_replicas_of_its_peaks(
    period_s: int,
) -> None:
    outcome = Fleet(POLICY.min, POLICY).run(
        lambda second: 14.0 if second // period_s % 2 else 3.0, seed=3
    )
    assert outcome.turns <= 1
    assert len(outcome.steps) <= 5


@pytest.mark.parametrize("name", ["step x4 and back", "day", "sawtooth of 20 minutes"])
def test_a_load_that_changes_slowly_is_served_like_by_the_best_fixed_size(name: str) -> None:
    scaled = Fleet(POLICY.min, POLICY).run(TRACES[name])
    _, fixed = best_fixed(TRACES[name])
    assert scaled.lag(0.95) <= fixed.lag(0.95) + 1
    assert scaled.replica_s <= 1.2 * fixed.replica_s


def test_a_steady_load_hardly_ever_changes_the_number() -> None:
    runs = [Fleet(2, POLICY).run(TRACES["steady"], seed=seed) for seed in range(4)]
    assert sum(len(outcome.steps) for outcome in runs) <= 2


def test_a_fleet_whose_load_is_unknown_at_times_never_has_fewer_than_with_all_samples() -> None:
    dice = random.Random(7)
    blind = {second for second in range(HOUR_S) if dice.random() < 0.3}
    trace = TRACES["step x4 and back"]
    outcome = Fleet(POLICY.min, POLICY, blind=blind.__contains__).run(trace)
    assert outcome.unserved == 0 and outcome.lag(0.95) <= 5
    dark = Fleet(4, POLICY, blind=lambda second: True).run(trace)
    assert dark.steps == []


def test_random_loads_never_leave_the_bounds_nor_lose_a_request() -> None:
    for seed in range(6):
        dice = random.Random(seed)
        levels = [dice.choice([0.0, 1.0, 4.0, 12.0, 25.0]) for _ in range(HOUR_S // 60 + 1)]
        length = dice.choice([1, 3, 10])
        outcome = Fleet(POLICY.min, POLICY, start_s=dice.choice([10, 60, 300])).run(
            lambda second, length=length, levels=levels: levels[second // 60 // length], seed=seed
        )
        assert outcome.unserved == 0
        assert POLICY.min <= min(outcome.counts) and max(outcome.counts) <= POLICY.max
        assert outcome.turns <= 2 * HOUR_S / POLICY.down_after_s
        assert not math.isnan(outcome.lag(0.95))


def test_limits_show_before_the_load_is_measured(tmp_path: Path) -> None:
    scale = {"min": 1, "max": 4, "target": "queue", "value": 10}
    scaled, fixed = plan(tmp_path, scale=scale), plan(tmp_path, replicas=2)
    weights = FleetWeights("b", "/b", "digest")
    canary = Canary(weights, ("vllm-0",), 0.1, CanaryStage.SERVING, 0.0)
    with FleetState(tmp_path / "state.sqlite") as state:
        shown = unmeasured(scaled, state, 2)
        assert shown == ScalingStatus(2, 1, 4, "queue", 10, reason="not measured yet")
        assert unmeasured(fixed, state, 2) is None
        state.set_canary(canary)  # its share is that of the servers there are
        assert unmeasured(scaled, state, 2) is None
