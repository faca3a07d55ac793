"""What was pushed is what servers compute with, however they hold it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from tests.gpu.special import CASES, Case, SpecialFleet

pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_a_b_a_gives_the_answers_of_a(case: Case, special_fleet: SpecialFleet) -> None:
    a, b = case.checkpoints
    special_fleet.push(b)
    of_b = special_fleet.answers()
    special_fleet.push(a)
    assert special_fleet.answers() == special_fleet.started
    unchanged = [name for name, tokens in of_b.items() if tokens == special_fleet.started[name]]
    assert not unchanged
    verified = special_fleet.data("weights", "verify")
    assert verified["agree"] is True, verified


def test_a_push_brings_what_a_server_started_on_it_answers(
    case: Case,
    special_fleet: SpecialFleet,
    special_fleets: dict[str, Future[SpecialFleet]],
) -> None:
    """A layer that every reload leaves out would not be missed by going back and forth."""
    others = [c for c in CASES if c.model == case.model and c.checkpoints != case.checkpoints]
    if not (found := [c for c in others if c.name in special_fleets]):
        pytest.skip("no other fleet was started on that checkpoint")
    started = special_fleets[found[0].name].result().started
    special_fleet.push(case.checkpoints[1])
    answers = special_fleet.answers()
    assert {name: answers[name] for name in started if name in answers} == {
        name: tokens for name, tokens in started.items() if name in answers
    }
    assert answers.keys() & started.keys()


def test_streams_in_flight_go_on_as_if_nobody_had_pushed(
    case: Case, special_fleet: SpecialFleet
) -> None:
    if case.model != "exact":
        pytest.skip("needs a server whose sums do not depend on the batch")
    running = case.checkpoints[0]
    special_fleet.push(running)  # what comes next does not wait for a sender to start
    for name, url in special_fleet.servers.items():
        undisturbed, _ = asyncio.run(special_fleet.streams(url))
        disturbed, in_flight = asyncio.run(special_fleet.streams(url, disturb=running))
        assert in_flight, f"{name}: a stream was over before the push was"
        broken = {
            number: next((at for at, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), -1)
            for number, pair in enumerate(zip(undisturbed, disturbed, strict=True))
            if pair[0] != pair[1]
        }
        assert not broken, f"{name}: streams that differ, and from which token on: {broken}"


def test_the_second_push_is_copied_where_every_layer_can_be(
    case: Case, special_fleet: SpecialFleet
) -> None:
    """The first one proves the layout; one server that quantizes, or has data-parallel ranks, sends
    all through the loader.

    What is copied answers as what vLLM's loader brings, also where it is read meanwhile."""
    a, b = case.checkpoints
    special_fleet.push(b, layout="checkpoint")
    loaded = special_fleet.answers()
    special_fleet.push(b)
    copied = case.copied
    shares = case.transport == "ipc"
    for name, stage, answers, share in (
        (a, "auto", special_fleet.started, copied),
        (b, "auto", loaded, copied),
        (a, "stream", special_fleet.started, copied and shares),
    ):
        result = special_fleet.push(name, "--stage", stage)
        assert result["layout_share"] == float(share), result["notes"]
        assert special_fleet.answers() == answers
        assert all(server["weights_digest"] for server in result["servers"])
