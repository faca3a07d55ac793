"""What a rehearsal leaves behind: a warm sender, proven layouts, and servers as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push import layouts, rehearsal
from skyctl.push.check import Checked
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.layouts import choose_layout
from skyctl.push.rehearsal import rehearse
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.sender_way import SenderWay
from skyctl.push.servers import Holds
from skyctl.push.source import Source
from skyctl.push.way import Plan
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened, SenderFailed, SenderProcess
from skyctl.transfer.sender_pool import SenderPool
from skyctl.transfer.transports import Choice
from skyctl.transfer.transports.base import Transport
from skyctl.transfer.transports.shm import TRANSPORT as SHM
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.deliveries import Ipc, ReadySender, site
from tests.unit.push.layouts import LAYOUT, NUMBERS, PROCESSED, TENSORS, Workers, report

GIB = 1 << 30


class Numbers(ReadySender):
    """Numbers all parameters with the last chunk of a ring of two."""

    def __init__(self) -> None:
        super().__init__()
        self.released = 0
        self.rests = 0

    async def opened(self, **_: Any) -> Opened:
        return Opened({}, staged_whole=False)

    async def filled(self, chunk: int, **_: Any) -> Filled:
        assert chunk - self.released < 2, "its slot is not free"
        return Filled(chunk, chunk % 2, (), {"numbers": [NUMBERS if chunk == 2 else {}]})

    async def release(self, chunk: int) -> None:
        self.released = chunk + 1

    async def free_slots(self, **_: Any) -> None:
        self.rests += 1


class Server(Workers):
    """Its workers come to these numbers."""

    target = ServerTarget("demo-0", "http://127.0.0.1:1")

    def __init__(self, numbers: dict[str, int], **changes: Any) -> None:
        super().__init__(report(proven=False, **changes))
        self.numbers = numbers
        self.busy = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        self.busy = True
        yield
        self.busy = False

    async def ask_workers(self, method: str, kwargs: dict[str, Any], **more: Any) -> list[Any]:
        answers = await super().ask_workers(method, kwargs, **more)
        if method in ("skyctl_weight_digest", "skyctl_layout_process"):
            assert self.busy
        if method != "skyctl_weight_digest":
            return answers
        return [{"digest": "d", "place": 0, "rank": 0, "numbers": self.numbers, "rows": []}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(str(write_checkpoint(tmp_path / "a", TENSORS)))


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[ReadySender]:
    for known in ("_spelt_out", "_programs", "_checked"):
        monkeypatch.setattr(layouts, known, {})
    found: list[ReadySender] = []

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        found.append(Numbers())
        return found[-1]

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    return found


async def rehearsed(
    server: Server,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    *,
    transport: Transport,
    free: int = 64 * GIB,
) -> SenderPool:
    one = site(server, instance="1@1")
    fleet = PushFleet("demo", (one.given,))
    layout = await choose_layout("auto", transport.name, [one], checkpoint)
    plan = plan_chunks(checkpoint.tensors, 64, alignment=1)

    request, source = PushRequest("a"), Source(checkpoint.identity_digest, checkpoint)
    way = SenderWay(
        Choice(transport.name, ""),
        transport,
        request,
        fleet,
        source,
        chunks=plan,
        layout=layout.planned(plan, checkpoint) if layout.workers else layout,
    )

    async def check(*_: Any, **__: Any) -> Checked:
        return Checked(request, source, way, Plan(), (), (one,), ())

    monkeypatch.setattr(rehearsal, "check", check)
    monkeypatch.setattr(rehearsal, "free_gpu_memory", lambda: {0: free})
    pool = SenderPool()
    async with ControlClient() as client:
        await rehearse(PushRequest("a"), fleet, client=client, senders=pool, asking=server.asking)
    assert one.holds is Holds.OLD and not one.failure
    return pool


@pytest.mark.parametrize(
    ("numbers", "trusted"),
    [(NUMBERS, [{"layouts": [LAYOUT]}]), ({**NUMBERS, "down": 5}, [])],
    ids=["they are the checkpoint's", "one differs"],
)
async def test_a_layout_is_proven_by_what_the_servers_were_started_with(
    numbers: dict[str, int],
    trusted: list[Any],
    checkpoint: Checkpoint,
    senders: list[ReadySender],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(numbers)
    pool = await rehearsed(server, checkpoint, monkeypatch, transport=Ipc())
    [sender] = senders
    assert pool.idle is not None and pool.idle.sender is sender  # type: ignore[comparison-overlap]
    assert (sender.warm_by, sender.carriers, sender.exports) == ("ipc", [None], False)
    assert [asked for method, asked in server.calls if method == "skyctl_layout_trust"] == trusted
    assert not {"skyctl_layout_open", "skyctl_layout_load"} & set(server.asked)


class Showing(ReadySender):
    """Has a slot for each of three chunks, and shows them."""

    async def opened(self, **_: Any) -> Opened:
        shown = {"handles": ["handle"], "offsets": [0, 64, 128]}
        return Opened({}, staged_whole=True, shown=shown)

    async def filled(self, chunk: int, **_: Any) -> Filled:
        return Filled(chunk, chunk, (), {"numbers": [NUMBERS if chunk == 2 else {}]})


async def test_what_layers_process_is_proven_by_having_servers_process_it(
    checkpoint: Checkpoint, senders: list[ReadySender], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Showing()

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    server = Server(NUMBERS, **PROCESSED)
    await rehearsed(server, checkpoint, monkeypatch, transport=Ipc())
    told = [("skyctl_layout_process", {"chunk": chunk, "keep": False}) for chunk in range(3)]
    assert [call for call in server.calls if call in told] == told
    after = server.asked[server.asked.index("skyctl_layout_process") + 3 :]
    assert after[:3] == ["skyctl_layout_close", "skyctl_free_cached", "skyctl_weight_digest"]
    assert after[3:] == ["skyctl_layout_trust"] and "skyctl_layout_load" not in server.asked


@pytest.mark.parametrize(
    ("transport", "free", "warm", "proven"),
    [
        (SHM, 64 * GIB, False, False),  # its senders end with their push
        (Ipc(), 1 * GIB, False, False),  # less than twice what a context takes
        (Ipc(), 2 * GIB, True, True),
    ],
    ids=["nothing to keep", "no room", "room"],
)
async def test_nothing_is_taken_that_is_of_no_use_or_not_free(
    transport: Transport,
    free: int,
    warm: bool,
    proven: bool,
    checkpoint: Checkpoint,
    senders: list[ReadySender],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(NUMBERS)
    pool = await rehearsed(server, checkpoint, monkeypatch, transport=transport, free=free)
    assert (pool.idle is not None) == bool(senders) == warm
    assert ("skyctl_layout_trust" in server.asked) == proven


class Stuck(Numbers):
    """Fills nothing."""

    async def filled(self, chunk: int, **_: Any) -> Filled:
        self.reading.set()
        await asyncio.Event().wait()
        raise AssertionError

    def __init__(self) -> None:
        super().__init__()
        self.reading = asyncio.Event()


async def test_a_rehearsal_that_is_ended_leaves_its_sender_to_the_push(
    checkpoint: Checkpoint, senders: list[ReadySender], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Stuck()

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    server = Server(NUMBERS)
    task = asyncio.create_task(rehearsed(server, checkpoint, monkeypatch, transport=Ipc()))
    await sender.reading.wait()
    assert not server.busy
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and sender.rests == 1
    assert server.asked == ["skyctl_layout"]  # nobody is asked after that


class Dead(ReadySender):
    """Looks well until it is asked for something."""

    async def opened(self, **_: Any) -> Opened:
        raise SenderFailed("the sender ended with code -9")


@pytest.mark.parametrize(
    ("waiting", "used"),
    [(Dead, 1), (ReadySender, 0)],
    ids=["died in the pool", "well"],
)
async def test_a_push_takes_another_sender_where_the_one_that_waited_is_of_no_use(
    waiting: type[ReadySender],
    used: int,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawned: list[ReadySender] = [waiting(), ReadySender()]
    left = iter(spawned)

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        return next(left)

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    one = site(Workers())
    pool = SenderPool()
    plan = plan_chunks(checkpoint.tensors, 64, alignment=1)
    fleet = PushFleet("demo", (one.given,))
    delivery = ChunkDelivery(Ipc(), checkpoint, plan, fleet, senders=pool)
    await delivery.warm([one])
    await delivery.open([one])
    assert [bool(sender.reserves) for sender in spawned] == [True, bool(used)]
    options = {"server_gpus": [[0]], "by_rank": False}
    assert spawned[used].carriers[-1:] == ([options] if used else [None])
