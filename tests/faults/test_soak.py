"""A short soak on stubs, and the judge of its answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import Asked, soak
from benchmarks.soak.checker import Expected, Record, Span, committed_spans, judge
from benchmarks.soak.fleet import SoakFleet
from skyctl.store.journal import EventKind, Job, JobEvent, JobState

EXPECTED = Expected(
    pure={("a", 0): (1, 2, 3), ("b", 0): (7, 8, 9)},
    frozen={("a", "b", 0): [(1, 8, 9), (1, 2, 9)], ("b", "a", 0): [(7, 2, 3), (7, 8, 3)]},
)
ANSWER = Record(1, "router", 0, 3, 11.0, 12.0, "answered", 200, (1, 2, 3))


def test_a_short_soak_finds_every_answer_at_a_committed_version(tmp_path: Path) -> None:
    asked = Asked(
        requests=100,
        pushes=2,
        kills=2,
        minutes=0.5,
        seed=5,
        stub=True,
        clients=3,
        bound_s=20.0,
        dear_every_s=1000.0,
    )
    result = asyncio.run(soak(asked, tmp_path, asyncio.Event()))
    assert result["violations"] == 0, result["examples"]
    assert result["hung"] == 0
    assert result["verdicts"]["pure"] > 50
    assert result["pushes"] >= 1
    assert result["unsettled"] == result["bugs"] == []
    assert sum(map(len, result["second_terminal"].values())) >= 1
    assert result["left_behind"] == []


async def test_what_a_command_said_names_no_directory_of_the_machine(tmp_path: Path) -> None:
    tmp_path.joinpath("home").mkdir()
    done = await SoakFleet(tmp_path, stub=True, bound_s=1.0).command("status", "-f", str(tmp_path))
    assert "DIR" in done.said and str(tmp_path) not in done.said


def job(
    number: int, version: str, at: float, *, state: str = "succeeded"
) -> tuple[Job, list[JobEvent]]:
    pushed = Job(f"push-{number}", "push", JobState(state), "resume", 0, 0, {}, {}, at, at + 5)
    return pushed, [JobEvent(1, at + 3, EventKind.VERIFIED, {"version": f"{version}-{number}"})]


def test_a_version_may_be_served_from_its_commit_until_the_next_push_has_succeeded() -> None:
    spans = committed_spans("a", [job(1, "b", 10.0), job(2, "a", 20.0)])
    assert spans == [Span("a", 0.0, 15.0), Span("b", 13.0, 25.0), Span("a", 23.0)]


def test_a_push_that_died_after_its_commit_leaves_both_versions_possible() -> None:
    spans = committed_spans("a", [job(1, "b", 10.0, state="interrupted")])
    assert spans == [Span("a", 0.0), Span("b", 13.0)]


def test_a_push_that_died_before_its_commit_leaves_the_old_version_alone() -> None:
    pushed, _ = job(1, "b", 10.0, state="interrupted")
    assert committed_spans("a", [(pushed, [])]) == [Span("a", 0.0)]


@pytest.mark.parametrize(
    ("tokens", "spans", "verdict"),
    [
        ((1, 2, 3), [Span("a", 0.0)], "pure"),
        ((1, 2), [Span("a", 0.0)], "pure"),
        ((7, 8, 9), [Span("a", 0.0)], "uncommitted"),
        ((7, 8, 9), [Span("a", 0.0), Span("b", 12.5)], "uncommitted"),
        ((1, 2, 3), [Span("a", 0.0, 10.5), Span("b", 10.0)], "uncommitted"),
        ((1, 8, 9), [Span("a", 0.0, 11.8), Span("b", 11.5)], "frozen"),
        ((1, 8, 9), [Span("a", 0.0)], "mixed"),
        ((1, 9, 9), [Span("a", 0.0, 11.8), Span("b", 11.5)], "unknown"),
        ((), [Span("a", 0.0)], "empty"),
    ],
)
def test_an_answer_is_held_against_what_was_committed_meanwhile(
    tokens: tuple[int, ...], spans: list[Span], verdict: str
) -> None:
    assert judge(replace(ANSWER, tokens=tokens), spans, EXPECTED) == verdict
