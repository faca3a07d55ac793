"""What was pushed is what servers compute with, however they hold it."""

from __future__ import annotations

import asyncio

import pytest

from tests.gpu.special import CASES, Case, SpecialFleet

pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_a_b_a_gives_the_answers_of_a(case: Case, special_fleet: SpecialFleet) -> None:
    first = special_fleet.answers()
    special_fleet.push("b")
    other = special_fleet.answers()
    special_fleet.push("a")
    again = special_fleet.answers()
    assert again == first
    assert {name for name in first if other[name] == first[name]} == set()
    verified = special_fleet.data("weights", "verify")
    assert verified["agree"] is True, verified


def test_streams_in_flight_go_on_as_if_nobody_had_pushed(
    case: Case, special_fleet: SpecialFleet
) -> None:
    if case.model != "dense":
        pytest.skip("once for each transport")
    special_fleet.push("a")  # what comes next does not wait for a sender to start
    for name, url in special_fleet.servers.items():
        undisturbed, _ = asyncio.run(special_fleet.streams(url))
        disturbed, in_flight = asyncio.run(special_fleet.streams(url, disturb="a"))
        assert in_flight, f"{name}: a stream was over before the push was"
        broken = sum(a != b for a, b in zip(undisturbed, disturbed, strict=True))
        assert broken == 0, f"{name}: {broken} of {len(disturbed)} streams differ"
