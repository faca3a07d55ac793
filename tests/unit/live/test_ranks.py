"""Ranks that act as one: rounds that all take part in, and ranks that die, come late, or fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from skyctl.errors import PreflightError, SkyctlError
from skyctl.live.meeting import Address
from skyctl.live.ranks import Body, Hub, Link, RankFailed, Ranks, Step, failure_body


@asynccontextmanager
async def ranks(count: int, machines: Sequence[str] = ()) -> AsyncIterator[list[Ranks]]:
    hub = Hub(machines or [""] * count)
    await hub.listen("127.0.0.1")
    links = [await Link.connect(hub.address, rank, hub.machines) for rank in range(1, count)]
    try:
        yield [hub, *links]
    finally:
        for rank in [*links, hub]:
            await rank.close()


def step(number: int, name: str = "gather", patience_s: float = 20.0) -> Step:
    return Step(number, name, f"push {number}", patience_s)


async def added(bodies: list[Body]) -> list[Body]:
    total = sum(body["value"] for body in bodies)
    return [{"total": total, "rank": rank} for rank in range(len(bodies))]


def all_of(group: list[Ranks], at: Step) -> list[Awaitable[Body]]:
    return [rank.exchange(at, {"value": rank.rank + 1}, added) for rank in group]


async def outcomes(calls: list[Awaitable[Body]]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def messages(results: list[Any]) -> list[str]:
    assert all(isinstance(result, SkyctlError) for result in results), results
    return [result.message for result in results]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_rank_0_answers_each_rank_in_every_step(count: int) -> None:
    async with ranks(count) as group:
        for number in range(3):
            for name in ("gather", "write"):
                answers = await asyncio.gather(*all_of(group, step(number, name)))
                total = sum(range(1, count + 1))
                assert answers == [{"total": total, "rank": rank} for rank in range(count)]


async def test_what_rank_0_refuses_every_rank_raises_and_the_next_round_is_a_new_one() -> None:
    async def refuse(bodies: list[Body]) -> list[Body]:
        raise PreflightError("w is missing", hint="send it", details={"tensor": "w"})

    async with ranks(3) as group:
        results = await outcomes([rank.exchange(step(1), {}, refuse) for rank in group])
        assert messages(results) == ["w is missing"] * 3
        assert all(type(result) is PreflightError for result in results)
        assert results[2].hint == "send it" and results[2].details == {"tensor": "w"}
        assert (await asyncio.gather(*all_of(group, step(2))))[0]["total"] == 6


async def test_what_a_rank_refuses_names_it_on_every_rank() -> None:
    async with ranks(3) as group:
        bodies = [{}, {}, failure_body(PreflightError("x is placed as P", hint="redistribute"))]
        calls = [
            rank.exchange(step(1), body, added) for rank, body in zip(group, bodies, strict=True)
        ]
        results = await outcomes(calls)
        assert messages(results) == ["rank 2: x is placed as P"] * 3
        assert all(type(result) is PreflightError for result in results)
        broken = failure_body(ZeroDivisionError("division by zero"))
        calls = [rank.exchange(step(2), broken if rank.rank else {}, added) for rank in group]
        assert "rank 1: ZeroDivisionError" in messages(await outcomes(calls))[0]


@pytest.mark.parametrize("when", ["before", "between"])
async def test_a_rank_that_ends_is_named(when: str) -> None:
    async with ranks(3) as group:
        if when == "between":
            await asyncio.gather(*all_of(group, step(1)))
        waiting = [asyncio.ensure_future(call) for call in all_of(group[:2], step(1, "write"))]
        await asyncio.sleep(0)
        await group[2].close()
        for message in messages(await outcomes(list(waiting))):
            assert message.startswith("rank 2 (pid") and message.endswith("push 1 is given up")


async def test_the_end_of_rank_0_is_noticed_at_once() -> None:
    async with ranks(3) as group:
        waiting = [asyncio.ensure_future(call) for call in all_of(group[1:], step(1))]
        await asyncio.sleep(0)
        await group[0].close()
        for message in messages(await outcomes(list(waiting))):
            assert message.startswith("rank 0 (pid") and "has ended" in message
        assert "rank 0" in messages(await outcomes(all_of(group[1:], step(2))))[0]


async def test_ranks_that_do_not_come_are_named_and_learn_of_it_when_they_do() -> None:
    async with ranks(4) as group:
        impatient = all_of(group[:1], step(1, patience_s=0.05))
        results = await outcomes([*impatient, *all_of(group[1:2], step(1))])
        expected = "2 ranks (2, 3) have not come to push 1 within 50 ms"
        assert messages(results) == [expected] * 2
        assert messages(await outcomes(all_of(group[2:], step(1)))) == [expected] * 2
        assert (await asyncio.gather(*all_of(group, step(2))))[0]["total"] == 10


async def test_a_rank_that_gave_rank_0_up_fails_the_round_for_the_others() -> None:
    async with ranks(3) as group:
        late = await outcomes(all_of(group[1:2], step(1, patience_s=0.05)))
        assert messages(late) == ["rank 0 has not come to push 1 within 50 ms"]
        results = await outcomes(all_of([group[0], group[2]], step(1)))
        assert messages(results) == [f"rank 1: {messages(late)[0]}"] * 2
        assert (await asyncio.gather(*all_of(group, step(2))))[0]["total"] == 6


async def test_a_rank_that_is_cancelled_fails_the_round_for_the_others() -> None:
    async with ranks(2) as group:
        waiting = asyncio.ensure_future(all_of(group[1:], step(1))[0])
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(RankFailed, match="rank 1: it was cancelled"):
            await all_of(group[:1], step(1))[0]


async def test_a_rank_whose_memory_is_read_waits_however_often_it_is_cancelled() -> None:
    ended = asyncio.Event()

    async def read(bodies: list[Body]) -> list[Body]:
        await ended.wait()
        return [{}] * len(bodies)

    async with ranks(2) as group:
        lent = replace(step(1, "write"), lends=True)
        reading = asyncio.ensure_future(group[0].exchange(lent, {}, read))
        lending = asyncio.ensure_future(group[1].exchange(lent, {}, read))
        for _ in range(3):
            await asyncio.sleep(0.01)
            lending.cancel()
        await asyncio.sleep(0.01)
        assert not lending.done()
        ended.set()
        await reading
        with pytest.raises(asyncio.CancelledError):
            await lending


async def test_a_rank_whose_round_rank_0_has_abandoned_does_not_wait_on() -> None:
    async with ranks(2) as group:
        late = asyncio.ensure_future(all_of(group[1:], step(1))[0])
        next_round = asyncio.ensure_future(all_of(group[:1], step(2))[0])
        with pytest.raises(RankFailed, match="rank 0 has abandoned push 1"):
            await late
        assert await all_of(group[1:], step(2))[0] == {"total": 3, "rank": 1}
        assert await next_round == {"total": 3, "rank": 0}


async def test_nobody_listens() -> None:
    with pytest.raises(RankFailed, match="rank 3 does not reach rank 0"):
        await Link.connect(Address("skyctl-live-none"), 3, [""] * 4)


APART = ("here", "there", "here")


async def test_ranks_of_other_machines_meet_at_an_address() -> None:
    async with ranks(3, APART) as group:
        answers = await asyncio.gather(*all_of(group, step(1)))
        assert [answer["total"] for answer in answers] == [6] * 3
        waiting = [asyncio.ensure_future(call) for call in all_of([group[0], group[2]], step(2))]
        await asyncio.sleep(0)
        await group[1].close()
        for message in messages(await outcomes(list(waiting))):
            assert message.startswith("rank 1 (at 127.0.0.1) has ended")


async def test_who_does_not_know_the_secret_is_no_rank() -> None:
    async with ranks(3, APART) as group:
        address = group[0].address
        with pytest.raises(RankFailed, match=r"rank 1 does not reach rank 0 at 127\.0\.0\.1"):
            await Link.connect(replace(address, secret=bytes(32)), 1, APART)
        assert str(address.secret) not in repr(address)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(bytes(64))
        assert len(await reader.read()) == 32  # the challenge, and no word more
        writer.close()
        assert (await asyncio.gather(*all_of(group, step(1))))[1]["total"] == 6


async def test_on_one_machine_no_address_is_listened_at() -> None:
    async with ranks(3) as group:
        assert group[0].address.host == "" and not group[0].apart


def test_a_program_that_ends_with_its_ranks_open_shows_only_its_own_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        hub = Hub([""] * 2)
        await hub.listen("127.0.0.1")
        link = await Link.connect(hub.address, 1, hub.machines)
        left.extend((hub, link))
        await asyncio.sleep(0.05)  # the hub serves its link
        raise ValueError("its own")

    left: list[Ranks] = []
    with pytest.raises(ValueError, match="its own"):
        asyncio.run(fail())
    assert caplog.messages == []
