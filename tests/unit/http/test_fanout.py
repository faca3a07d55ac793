"""What a set of outcomes comes to."""

from __future__ import annotations

import asyncio

import pytest

from skyctl.errors import (
    DeadlineExceeded,
    PartialFailure,
    ServerError,
    ServerUnreachable,
    SkyctlError,
)
from skyctl.http.fanout import Outcome, OutcomeStatus, failure, fan_out, require_all
from skyctl.http.target import ServerTarget

TARGETS = [ServerTarget(f"demo-{n}", f"http://demo-{n}") for n in range(4)]


async def test_each_failure_becomes_the_outcome_of_its_own_server() -> None:
    async def call(target: ServerTarget) -> str:
        if target.name == "demo-1":
            raise ServerUnreachable("gone")
        if target.name == "demo-2":
            raise ServerError("answered 500")
        if target.name == "demo-3":
            await asyncio.Event().wait()
        return "value"

    outcomes = await asyncio.wait_for(fan_out(TARGETS, call, timeout_s=0.01), 5)
    assert [(o.server, o.status.value, o.detail) for o in outcomes] == [
        ("demo-0", "ok", ""),
        ("demo-1", "unreachable", "gone"),
        ("demo-2", "failed", "answered 500"),
        ("demo-3", "timeout", "no answer in 0.01 s"),
    ]
    assert outcomes[0].value == "value"


async def test_a_cancelled_fan_out_ends_when_its_calls_have_ended() -> None:
    under_way, cleaned_up = asyncio.Semaphore(0), list[str]()

    async def call(target: ServerTarget) -> None:
        try:
            under_way.release()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(target.name)

    asking = asyncio.create_task(fan_out(TARGETS, call, timeout_s=60))
    for _ in TARGETS:
        await under_way.acquire()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asking, 5)
    assert sorted(cleaned_up) == [target.name for target in TARGETS]


async def test_a_bug_in_one_call_is_raised_once_the_others_have_ended() -> None:
    ended = []

    async def call(target: ServerTarget) -> None:
        if target.name == "demo-0":
            raise KeyError("a bug")
        await asyncio.sleep(0)
        ended.append(target.name)

    with pytest.raises(KeyError):
        await fan_out(TARGETS, call, timeout_s=5)
    assert len(ended) == 3


async def test_without_servers_there_are_no_outcomes() -> None:
    assert await fan_out([], lambda target: asyncio.sleep(0), timeout_s=5) == []


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["ok", "ok"], None),
        (["ok", "skipped"], None),
        (["ok", "failed"], PartialFailure),
        (["rolled-back", "timeout"], PartialFailure),
        (["failed", "timeout"], ServerError),
        (["timeout", "timeout"], DeadlineExceeded),
    ],
)
def test_outcomes_come_to_one_error(words: list[str], kind: type[SkyctlError] | None) -> None:
    outcomes = [Outcome[None](f"demo-{n}", OutcomeStatus(w), 1.0) for n, w in enumerate(words)]
    error = failure(outcomes, "pause")
    assert (type(error) if error else None) is kind
    if kind is not None:
        with pytest.raises(kind, match=r"pause: \d of 2 servers failed"):
            require_all(outcomes, "pause")
