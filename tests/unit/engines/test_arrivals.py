"""What ranks send lands in memory that was taken before the push, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event, RLock, Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from skyctl.engines.vllm.inside import arrivals
from skyctl.engines.vllm.inside.arrivals import Arrivals, landing_bytes, steps_of
from skyctl.engines.vllm.inside.layout_memory import SPARE_BYTES
from skyctl.wire import batches
from skyctl.wire import peers as members
from skyctl.wire.group_store import GroupStore
from skyctl.wire.layouts import Copy, LayoutReport, Program
from skyctl.wire.peer_group import Meeting, Messages, PeerGroup

pytestmark = pytest.mark.usefixtures("vllm")

PEERS = "skyctl.engines.vllm.inside.peers"  # imports vLLM
STEP = 1024
SIZE = 64
COUNT = 256
MEETING = Meeting("group", "gloo", "127.0.0.1", 1, "00", 2, 30.0, 30.0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches.batches, "__defaults__", (STEP,))


def copies_of(ranks: int) -> tuple[list[Copy], list[list[int]]]:
    """One parameter, of which each rank sends every so many-th piece."""
    copies = [Copy(n, 0, 1, SIZE, 0, SIZE, n * SIZE, SIZE) for n in range(COUNT)]
    return copies, [[n % ranks, n // ranks] for n in range(COUNT)]


class Store:
    """A connection to rank 0's."""

    def __init__(self, *_: Any) -> None: ...

    def stay(self, on_end: Callable[[], object]) -> None:
        self.ends = on_end

    def close(self) -> None: ...


class Group(PeerGroup):
    """Sends its number in each byte of a message; notes where they land."""

    closed = False

    def __init__(self) -> None:
        self.storages: set[int] = set()

    def close(self) -> None:
        self.closed = True

    def transfer(self, sends: Messages, receives: Messages) -> None:
        for rank, message in receives:
            message.fill_(rank + 1)
            self.storages.add(message.untyped_storage().data_ptr())


@pytest.mark.parametrize("ranks", [1, 8])
def test_all_steps_land_in_memory_that_does_not_grow_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    group, target = Group(), torch.zeros(COUNT * SIZE, dtype=torch.uint8)
    monkeypatch.setattr(arrivals, "join", lambda *_: group)
    monkeypatch.setattr(arrivals, "connected", Store)
    steps = steps_of(*copies_of(ranks))
    assert len(steps) == COUNT * SIZE // STEP and landing_bytes(steps) == STEP
    arriving = Arrivals(MEETING, 1, CPU, steps, lambda: None)
    before = arriving._landing.untyped_storage().data_ptr()
    arriving.receive({0: target})
    arriving.wait()
    assert group.storages == {before}
    assert target.view(COUNT, SIZE)[:, 0].tolist() == [n % ranks + 1 for n in range(COUNT)]


@pytest.mark.parametrize(("landing", "staged"), [(0, False), (STEP, True)])
def test_a_worker_stages_where_there_is_room_for_what_lands_too(
    monkeypatch: pytest.MonkeyPatch, landing: int, staged: bool
) -> None:
    required: list[int] = []
    loader = loader_with(monkeypatch, free=COUNT * SIZE + SPARE_BYTES + landing)
    monkeypatch.setattr(f"{PEERS}.require_free", lambda size, device: required.append(size))
    assert joined(loader) is staged
    assert required == [STEP]


def test_a_worker_without_memory_for_what_lands_refuses_before_the_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("0 MiB are free")

    loader = loader_with(monkeypatch, free=0)
    monkeypatch.setattr(f"{PEERS}.require_free", refuse)
    with pytest.raises(RuntimeError, match="0 MiB are free"):
        joined(loader)
    assert loader.key == ""


@pytest.mark.parametrize("next_trainer", [False, True])
def test_a_worker_lets_go_of_a_trainer_that_has_ended_and_of_no_later_one(
    monkeypatch: pytest.MonkeyPatch, next_trainer: bool
) -> None:
    groups, stores = [Group(), Group()], [Store(), Store()]
    coming, connecting = iter(groups), iter(stores)
    loader = loader_with(monkeypatch, free=COUNT * SIZE + SPARE_BYTES + STEP)
    monkeypatch.setattr(arrivals, "join", lambda *_: next(coming))
    monkeypatch.setattr(arrivals, "connected", lambda _: next(connecting))
    monkeypatch.setattr(arrivals, "GRACE_S", 0.0)
    assert joined(loader)
    loader._arrivals.wait()
    assert loader.has_arrived("key")
    if next_trainer:
        assert joined(loader, key="next")
        loader._arrivals.wait()
    stores[0].ends()
    assert groups[0].closed and not groups[1].closed
    assert (loader.key, loader._beside is None) == (("next", False) if next_trainer else ("", True))
    with pytest.raises(RuntimeError, match="let go"):
        loader.has_arrived("key")


def test_a_worker_lets_go_of_a_trainer_that_ends_while_its_memory_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension

    trainers, watched = {4321}, list[Callable[[], object]]()
    loader = loader_with(monkeypatch, free=0)

    def watch(pids: Sequence[int], act: Callable[[], object]) -> None:
        watched.extend(act for pid in pids if pid in trainers)  # an ended one cannot be seen

    def map_memory(_program: Program, _exports: Any, key: str, _staged: bool | None) -> bool:
        trainers.clear()
        loader.key = key
        return False

    monkeypatch.setattr(type(loader), "rank", 0)
    monkeypatch.setattr(f"{PEERS}.when_ended", watch)
    loader.map = map_memory
    worker = SkyctlWorkerExtension()
    worker._skyctl_layout_loader = loader
    programs = [Program("layout", (), ()).to_wire()]
    assert worker.skyctl_layout_map(programs, [[]], "key", [4321], None) is False
    assert loader.key == "key"
    for act in watched:
        act()
    assert loader.key == ""


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("layout", ()),
        ("layout_open", ([Program("layout", (), ()).to_wire()],)),
        ("layout_process", (0, True)),
        ("layout_receive", ([],)),
        ("layout_close", ()),
    ],
)
def test_a_push_waits_while_a_trainer_that_has_ended_is_let_go(
    method: str, arguments: tuple[Any, ...]
) -> None:
    """Else what the push has opened by then would be released in its place."""
    from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension

    lock, called = RLock(), Event()

    def call(*_: Any) -> LayoutReport:
        called.set()
        return LayoutReport(0)

    calls = dict.fromkeys(("report", "open", "process", "receive", "close"), call)
    worker = SkyctlWorkerExtension()
    worker._skyctl_layout_loader = SimpleNamespace(lock=lock, rank=0, **calls)
    with lock:
        pushing = Thread(target=getattr(worker, f"skyctl_{method}"), args=arguments)
        pushing.start()
        assert not called.wait(0.1)
    pushing.join(30.0)
    assert called.is_set()


@pytest.mark.parametrize("amid", ["a transfer", "the meeting"])
def test_a_worker_lets_go_of_a_trainer_that_dies_while_it_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, amid: str
) -> None:
    store = GroupStore("127.0.0.1", bytes(32), ranks=1, timeout_s=30.0)
    meeting = replace(MEETING, port=store.port, secret=bytes(32).hex())
    loader, let_go = loader_with(monkeypatch, free=COUNT * SIZE + SPARE_BYTES + STEP), Event()
    release = loader.release
    loader.release = lambda key: (release(key), let_go.set())
    monkeypatch.setattr(arrivals, "join", members.join)
    monkeypatch.setattr(arrivals, "connected", members.connected)
    monkeypatch.setattr(arrivals, "GRACE_S", 0.0)
    with loader.lock:
        assert joined(loader, meeting=meeting)
        begun = loader._arrivals
        if amid == "a transfer":
            rank = members.join(meeting, 0, CPU, store)
            begun.receive(loader._beside.parameters)
            rank.close()
        store.close()
        with pytest.raises(RuntimeError):
            begun.wait()
        assert loader._beside is not None and not let_go.is_set()
    assert let_go.wait(30.0), "it keeps the group and what lies beside the parameters"
    assert (loader.key, loader._arrivals, loader._beside) == ("", None, None)


def loader_with(monkeypatch: pytest.MonkeyPatch, *, free: int) -> Any:
    """The loader of a worker that packs nothing, with so much memory free."""
    from skyctl.engines.vllm.inside.peers import PeerLoader

    target = torch.zeros(COUNT * SIZE, dtype=torch.uint8)
    monkeypatch.setattr(PeerLoader, "_packs", False)
    monkeypatch.setattr(PeerLoader, "_begin", lambda *_, slots: None)
    monkeypatch.setattr(PeerLoader, "_targets", lambda *_: {0: target})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(arrivals, "join", lambda *_: Group())
    monkeypatch.setattr(arrivals, "connected", Store)
    return PeerLoader(SimpleNamespace(device=CPU))


def joined(loader: Any, key: str = "key", meeting: Meeting = MEETING) -> bool:
    copies, sources = copies_of(4)
    program = Program("layout", (("w", "uint8", (COUNT * SIZE,)),), tuple(copies))
    staged: bool = loader.join(program, sources, key, None, meeting.to_wire(), 1)
    return staged
