"""Many deadlines under one timer."""

from __future__ import annotations

import asyncio

from skyctl.http.connections import Deadlines


async def test_each_is_late_at_its_own_time_and_once() -> None:
    late = asyncio.Queue[str]()
    deadlines = Deadlines(late.put_nowait)
    now = deadlines.loop.time()
    for name, after in (("last", 0.03), ("first", 0.01), ("second", 0.02), ("never", 60.0)):
        deadlines.put(name, now + after)
    async with asyncio.timeout(5):
        assert [await late.get() for _ in range(3)] == ["first", "second", "last"]
    await asyncio.sleep(0.05)
    assert late.empty()


async def test_what_was_taken_back_is_never_late_and_hides_no_other() -> None:
    late = asyncio.Queue[str]()
    deadlines = Deadlines(late.put_nowait)
    now = deadlines.loop.time()
    deadlines.put("answered", now + 0.01)
    deadlines.put("silent", now + 0.03)
    deadlines.take_back("answered")
    deadlines.take_back("unknown")
    async with asyncio.timeout(5):
        assert await late.get() == "silent"
    assert late.empty()


async def test_one_may_be_put_again_with_a_later_time() -> None:
    late = asyncio.Queue[float]()
    deadlines = Deadlines[str](lambda _: late.put_nowait(deadlines.loop.time()))
    now = deadlines.loop.time()
    deadlines.put("kept", now + 0.01)
    deadlines.take_back("kept")
    deadlines.put("kept", now + 0.05)
    async with asyncio.timeout(5):
        assert await late.get() >= now + 0.05
