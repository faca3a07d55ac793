"""Counters become rates, and a restarted server never a negative one."""

from __future__ import annotations

import pytest

from skyctl.monitoring.sampler import RateMeter


def test_the_first_look_knows_no_rate_and_the_second_does() -> None:
    meter = RateMeter()
    assert meter.per_second("tokens", 100, at=10.0) is None
    assert meter.per_second("tokens", 150, at=12.0) == 25.0
    assert meter.per_second("tokens", 150, at=13.0) == 0.0


def test_a_counter_that_fell_belongs_to_a_new_process() -> None:
    meter = RateMeter()
    meter.per_second("tokens", 100, at=0.0)
    assert meter.per_second("tokens", 7, at=1.0) is None
    assert meter.per_second("tokens", 10, at=2.0) == 3.0


def test_an_unknown_value_starts_afresh() -> None:
    meter = RateMeter()
    meter.per_second("tokens", 100, at=0.0)
    assert meter.per_second("tokens", None, at=1.0) is None
    assert meter.per_second("tokens", 900, at=2.0) is None


def test_counters_do_not_mix() -> None:
    meter = RateMeter()
    meter.per_second("a", 0, at=0.0)
    meter.per_second("b", 1000, at=0.0)
    assert meter.per_second("a", 5, at=1.0) == 5.0


@pytest.mark.parametrize(
    ("part", "whole", "expected"), [(30, 140, 0.5), (10, 100, None), (10, 50, None)]
)
def test_a_ratio_is_of_what_both_grew_by(part: int, whole: int, expected: float | None) -> None:
    meter = RateMeter()
    meter.ratio("hits", 10, 100, at=0.0)
    assert meter.ratio("hits", part, whole, at=1.0) == expected
