"""A server's time in a push: what it loads, and what it waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.push.request import PushRequest
from skyctl.push.servers import Spans
from skyctl.push.transaction import push
from tests.stub.faults import Fault
from tests.unit.push.fleets import BEFORE_FREEZE, Recorder, Stubs


def spans(*moments: float) -> Spans:
    times = iter(moments)
    return Spans(clock=lambda: next(times))


def test_calls_that_overlap_count_once_and_gaps_are_waits() -> None:
    one = spans(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    with one.loading():  # 0 to 1
        pass
    with one.loading(), one.loading():  # 2 to 5, and 3 to 4 within it
        pass
    assert one.load_s == pytest.approx(1.0 + 3.0)
    assert one.wait_s == pytest.approx(1.0)


def test_without_a_call_there_is_nothing() -> None:
    one = spans()
    assert (one.load_s, one.wait_s, one.freeze_s) == (0.0, 0.0, None)
    one.frozen_at = 2.0
    assert one.freeze_s is None
    one.thawed_at = 5.5
    assert one.freeze_s == 3.5


@pytest.mark.parametrize("transport", ["shm", "disk"])
async def test_a_push_tells_each_servers_time(tmp_path: Path, transport: str) -> None:
    stubs = Stubs(tmp_path)
    await stubs.engines[1].pause("keep")
    loading = {"shm": ("/update_weights", 1), "disk": ("/collective_rpc", BEFORE_FREEZE + 2)}
    route, call = loading[transport]
    stubs.servers[0].asgi.faults[route] = Fault("delay", seconds=0.2, calls=(call,))
    async with stubs.client() as client:
        request = PushRequest(str(stubs.new), transport=transport)
        result = await push(request, stubs.fleet, client=client, observer=Recorder())
    slow, held = result.servers
    assert slow.freeze_s is not None and slow.freeze_s <= result.freeze_window_s
    assert held.freeze_s is None  # it was frozen before, and still is
    assert slow.load_s >= 0.19 and held.load_s > 0
    assert slow.load_s + slow.wait_s <= result.stages["update"] + 0.001
