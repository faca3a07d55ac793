"""`--stage-rate`: while servers serve, and never while they are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.errors import PreflightError
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.request import PushFleet, PushRequest, Timeouts
from skyctl.push.sender_way import refuse_stage_rate
from skyctl.push.servers import Holds, PushedServer
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import SenderProcess
from skyctl.transfer.sender_pool import SenderPool
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.deliveries import Ipc, ReadySender, site


class Patience(ReadySender):
    """Notes how long it is waited for, and what it was told by then."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    async def filled(self, chunk: int, *, timeout_s: float = 0.0, **_: Any) -> Filled:
        assert not self.hurried
        self.waits.append(timeout_s)
        return Filled(chunk, chunk, ())


async def staged(
    one: PushedServer, rate: int | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Patience, int]:
    sender = Patience()

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    checkpoint = read_checkpoint(str(write_checkpoint(directory / "a")))
    plan = plan_chunks(checkpoint.tensors, 1 << 20)
    fleet = PushFleet("demo", (one.given,), timeouts=Timeouts(update_s=5.0))
    delivery = ChunkDelivery(Ipc(), checkpoint, plan, fleet, senders=SenderPool(), stage_rate=rate)
    await delivery.open([one])
    return sender, plan.chunks[0].size


async def test_a_sender_is_bounded_until_what_is_read_ahead_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, size = await staged(site(None), 100, tmp_path, monkeypatch)
    assert (sender.paces, sender.hurried) == ([100], True)
    assert sender.waits == [pytest.approx(5.0 + size / 100)]  # no bound makes a sender too slow


def frozen(one: PushedServer) -> PushedServer:
    one.did.frozen = True
    return one


def half_updated(one: PushedServer) -> PushedServer:
    one.holds = Holds.UNKNOWN
    return one


@pytest.mark.parametrize(
    ("one", "rate"),
    [(site(None), None), (frozen(site(None)), 100), (half_updated(site(None)), 100)],
    ids=["no rate", "second attempt", "an earlier push froze it"],
)
async def test_nothing_is_bounded_where_nobody_serves(
    one: PushedServer, rate: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = await staged(one, rate, tmp_path, monkeypatch)
    assert sender.paces == [None] and sender.waits == [5.0]


@pytest.mark.parametrize(
    ("rate", "transport", "problem"),
    [
        (9_999_999, "ipc", "at least 10000000 bytes per second"),
        (-1, "ipc", "at least"),
        (2_000_000_000, "disk", "servers read by themselves with transport disk"),
    ],
)
def test_a_rate_that_cannot_be_kept_is_refused(rate: int, transport: str, problem: str) -> None:
    with pytest.raises(PreflightError, match=problem):
        refuse_stage_rate(PushRequest("a", stage_rate=rate), transport)
    refuse_stage_rate(PushRequest("a"), transport)
    refuse_stage_rate(PushRequest("a", stage_rate=2_000_000_000), "shm")
