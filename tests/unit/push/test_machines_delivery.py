"""A push with a sender on each of several machines."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.errors import PreflightError, PushError, ServerError
from skyctl.http.target import ServerTarget
from skyctl.launch.base import Node
from skyctl.push.commit import _compare
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.machines_delivery import MachinesDelivery
from skyctl.push.request import PushFleet, PushRequest, Reading
from skyctl.push.sender_way import SenderWay
from skyctl.push.servers import Holds, PushedServer, alive
from skyctl.push.source import Source, read_source
from skyctl.push.transaction import push
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import CheckpointChanged, Filled, ShardFiles
from skyctl.transfer.sender_client import Opened, SenderFailed, SenderProcess
from skyctl.transfer.sender_pool import SenderPool
from skyctl.transfer.transports import Choice
from skyctl.transfer.transports.gloo import GlooTransport
from skyctl.wire.layouts import Program
from tests.stub import rows as stub_rows
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.push.deliveries import Ipc, ReadySender, site
from tests.unit.push.fleets import Recorder, Stubs

A, B = NODES = tuple(Node(f"me@{name}", name, "python", ("ssh",), 60.0) for name in ("a", "b"))

PROGRAM = Program("a layout", (("w", "bfloat16", (4,)),), ())


class Server:
    async def init_weight_transfer(self, *_: Any, **__: Any) -> None: ...

    async def update_weights(self, *_: Any, **__: Any) -> None: ...

    async def finish_weight_update(self, *_: Any, **__: Any) -> None: ...


class Sender(ReadySender):
    """Reads this byte over and over, and may be told how to fail. Without `crc32`, bytes that it
    reads onto a GPU never pass through the CPU."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.read = 1
        self.crc32 = True
        self.fails_at = ""
        self.closed = False

    async def opened(self, **named: Any) -> Any:
        self._fail("opened")
        return await super().opened(**named)

    async def relayed(self, **_: Any) -> None:
        self._fail("relayed")

    async def filled(self, chunk: int, **_: Any) -> Filled:
        if chunk:
            self._fail("filled")
        crc32 = (self.read,) * 9 if self.crc32 else ()
        return Filled(chunk, chunk, crc32, {"numbers": [{"w": self.read}]})

    async def close(self) -> None:
        self.closed = True

    def _fail(self, where: str) -> None:
        if self.fails_at == where:
            raise SenderFailed(f"the sender on {self.node.target} failed: no more")


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> dict[Node, Sender]:
    made = {node: Sender(node) for node in NODES}

    async def spawn(*_: Any, node: Node) -> Sender:
        return made[node]

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    return made


@pytest.fixture
def sites() -> list[PushedServer]:
    return [site(Server(), name=f"wide-{i}", node=NODES[i % 2]) for i in range(3)]


def made(
    tmp_path: Path, sites: list[PushedServer], pool: SenderPool, **named: Any
) -> MachinesDelivery:
    read = read_checkpoint(str(write_checkpoint(tmp_path / "c")))
    fleet = PushFleet("wide", tuple(one.given for one in sites))
    plan = plan_chunks(read.tensors, 1024)
    programs = {one.name: [PROGRAM] for one in sites}
    deliver = functools.partial(ChunkDelivery, Ipc(), read, plan, fleet, programs=programs)
    parts = {node: deliver(senders=pool) for node in NODES}
    return MachinesDelivery(parts, **named)


@pytest.fixture
def delivery(tmp_path: Path, sites: list[PushedServer]) -> MachinesDelivery:
    return made(tmp_path, sites, SenderPool())


async def carry(
    delivery: MachinesDelivery, sites: list[PushedServer], done: Callable[[int], None]
) -> None:
    try:
        await delivery.open(sites)
        await delivery.init(sites)
        await delivery.update(sites, done)
        await delivery.finish(sites, lambda: "v")
    finally:
        await delivery.close()


async def test_each_machines_servers_get_what_its_sender_reads(
    delivery: MachinesDelivery, senders: dict[Node, Sender], sites: list[PushedServer]
) -> None:
    told: list[int] = []
    await carry(delivery, sites, told.append)
    assert {one.holds for one in sites} == {Holds.NEW}
    assert [len(sender.carriers[0]["server_gpus"]) for sender in senders.values()] == [2, 1]
    assert told == sorted(told)
    assert delivery.content_digest


async def test_a_sender_that_cannot_stage_ends_the_push_before_any_server_is_touched(
    delivery: MachinesDelivery, senders: dict[Node, Sender], sites: list[PushedServer]
) -> None:
    senders[B].fails_at = "opened"
    with pytest.raises(SenderFailed, match="the sender on me@b failed"):
        await carry(delivery, sites, lambda _: None)
    assert {one.holds for one in sites} == {Holds.OLD}
    assert all(sender.closed for sender in senders.values())


async def test_files_that_a_sender_elsewhere_opened_after_they_changed_are_not_pushed(
    delivery: MachinesDelivery,
    senders: dict[Node, Sender],
    sites: list[PushedServer],
    tmp_path: Path,
) -> None:
    """Two steps of one model have the same header and size: there, nothing tells them apart."""
    opened = senders[B].opened

    async def late(**named: Any) -> Any:
        os.utime(tmp_path / "c" / "model.safetensors", ns=(1, 1))
        return await opened(**named)

    senders[B].opened = late  # type: ignore[method-assign]
    with pytest.raises(PreflightError, match="changed during the push"):
        await carry(delivery, sites, lambda _: None)
    assert {one.holds for one in sites} == {Holds.OLD}
    assert all(sender.closed for sender in senders.values())


async def test_a_sender_that_dies_takes_out_its_own_machine_alone(
    delivery: MachinesDelivery, senders: dict[Node, Sender], sites: list[PushedServer]
) -> None:
    await delivery.open(sites)
    await delivery.init(sites)
    senders[B].fails_at = "filled"
    await delivery.update(sites, lambda _: None)
    assert [one.failure for one in sites] == ["", "the sender on me@b failed: no more", ""]
    assert delivery.can_retry
    assert delivery.content_digest
    await delivery.close()


@pytest.mark.parametrize("crc32", [True, False])
async def test_nobody_can_tell_which_of_two_machines_has_the_right_bytes(
    delivery: MachinesDelivery, senders: dict[Node, Sender], sites: list[PushedServer], crc32: bool
) -> None:
    for sender in senders.values():
        sender.crc32 = crc32
    senders[B].read = 2
    await carry(delivery, sites, lambda _: None)
    assert not alive(sites)
    assert {one.holds for one in sites} == {Holds.UNKNOWN}
    assert "not the same on every machine (me@a, me@b)" in sites[0].failure
    assert not delivery.can_retry


async def test_what_fails_on_one_machine_waits_for_no_other(
    delivery: MachinesDelivery, senders: dict[Node, Sender], sites: list[PushedServer]
) -> None:
    async def never(**_: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    senders[A].opened = never  # type: ignore[method-assign]
    senders[B].fails_at = "opened"
    async with asyncio.timeout(30):
        with pytest.raises(SenderFailed, match="me@b"):
            await carry(delivery, sites, lambda _: None)


async def test_one_machine_reads_for_all_in_a_group_that_lasts_as_long_as_its_senders(
    senders: dict[Node, Sender], sites: list[PushedServer], tmp_path: Path
) -> None:
    pool = SenderPool()

    async def carried(those: list[PushedServer]) -> None:
        await carry(made(tmp_path, sites, pool, one_reader=True), those, lambda _: None)

    for _ in range(2):
        await carried(sites)
    assert senders[A].relays == [(0, 2, ""), (0, 0, "")]
    assert senders[B].relays == [(1, 2, "group 1"), (1, 0, "")]
    assert {one.holds for one in sites} == {Holds.NEW}
    await carried(sites[1:2])  # alone, it reads by itself
    assert senders[B].relay_ranks == [1, 1, None]
    senders[B].healthy = False  # type: ignore[misc]
    senders[B] = Sender(B)
    await carried(sites)
    assert senders[A].relays[2:] == [(0, 2, "")]
    assert senders[B].relays == [(1, 2, "group 3")]
    await pool.close()


@pytest.mark.parametrize("fails_at", ["opened", "relayed", "filled"])
async def test_a_machine_that_dies_while_one_reads_for_all_fails_the_push_untouched(
    senders: dict[Node, Sender], sites: list[PushedServer], tmp_path: Path, fails_at: str
) -> None:
    """The others would wait in a broadcast for it: nothing of that is left to the freeze."""
    senders[B].fails_at = fails_at
    pool = SenderPool()
    with pytest.raises(SenderFailed, match="the sender on me@b failed") as caught:
        await carry(made(tmp_path, sites, pool, one_reader=True), sites, lambda _: None)
    assert ("readers to all" in caught.value.hint) == (fails_at == "relayed")
    assert {one.holds for one in sites} == {Holds.OLD}
    assert all(sender.closed for sender in senders.values())


async def test_what_does_not_fit_as_a_whole_is_not_passed_on(
    senders: dict[Node, Sender], sites: list[PushedServer], tmp_path: Path
) -> None:
    async def streams(**_: Any) -> Opened:
        return Opened({}, staged_whole=False)

    senders[B].opened = streams  # type: ignore[method-assign]
    with pytest.raises(PreflightError, match="does not fit as a whole"):
        await carry(made(tmp_path, sites, SenderPool(), one_reader=True), sites, lambda _: None)
    assert {one.holds for one in sites} == {Holds.OLD}


@pytest.mark.parametrize("again", [False, True])
async def test_in_the_freeze_each_machine_reads_by_itself(
    senders: dict[Node, Sender], sites: list[PushedServer], tmp_path: Path, again: bool
) -> None:
    """A second attempt is made there: a machine that died in a group would keep it frozen."""
    read = read_checkpoint(str(write_checkpoint(tmp_path / "c")))
    servers = tuple(one.given for one in sites)
    fleet = PushFleet("wide", servers, reading=Reading(one_reader=True))
    request, chunks = PushRequest(str(read.path), scan_nan=False), plan_chunks(read.tensors, 1024)
    source = Source(read.identity_digest, read)
    way = SenderWay(Choice("ipc", ""), Ipc(), request, fleet, source, chunks=chunks)
    delivery = way.delivery(SenderPool(), by_loader=again)
    await delivery.open(sites)
    assert [senders[node].relay_ranks for node in NODES] == (
        [[None], [None]] if again else [[0], [1]]
    )
    await delivery.close()


async def test_one_reader_needs_gpus(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, 2)
    there = zip(stubs.fleet.servers, NODES, strict=True)
    servers = tuple(replace(server, node=node) for server, node in there)
    fleet = replace(stubs.fleet, servers=servers, reading=Reading(one_reader=True))
    request = PushRequest(str(stubs.new), transport="shm")
    async with stubs.client() as client:
        with pytest.raises(PreflightError, match="transport shm does not use"):
            await push(request, fleet, client=client, observer=Recorder())
    assert all(engine.log == [] for engine in stubs.engines)


async def test_one_sender_of_a_group_is_beside_the_first_of_its_servers(
    senders: dict[Node, Sender], sites: list[PushedServer], tmp_path: Path
) -> None:
    """A second attempt goes without the machine that has died, sender and all."""
    read = read_checkpoint(str(write_checkpoint(tmp_path / "c")))
    fleet = PushFleet("wide", tuple(one.given for one in sites))
    for those, beside, other in ((sites, A, B), (sites[1:2], B, A)):
        plan = plan_chunks(read.tensors, 1024)
        delivery = ChunkDelivery(GlooTransport(), read, plan, fleet, senders=SenderPool())
        senders[other].carriers.clear()
        await delivery.open(those)
        assert senders[beside].carriers[-1]["address"] == beside.address
        assert senders[beside].carriers[-1]["world_size"] == 1 + len(those)
        assert not senders[other].carriers
        await delivery.close()


class Stale:
    """One worker, into which its machine's sender brought the files in this directory."""

    def __init__(self, directory: Path) -> None:
        self.target = ServerTarget("wide-0", "http://127.0.0.1:1")
        self._holds = stub_rows.of_checkpoint(str(directory))

    async def is_paused(self) -> bool:
        return True

    async def reset_caches(self) -> None: ...

    async def ask_workers(self, method: str, kwargs: dict[str, Any], **_: Any) -> list[Any]:
        rows = stub_rows.answers(self._holds, kwargs["rows"])
        return [{"digest": "d", "place": 0, "numbers": {"w": 1}, "rows": rows}]


async def test_what_a_sender_elsewhere_has_read_is_compared_with_the_files_here(
    tmp_path: Path,
) -> None:
    """A copy there may be another step's: the sender's own numbers agree with what it read."""
    there = write_checkpoint(tmp_path / "there", tiny_tensors(90))
    server = site(Stale(there), name="wide-0", node=A)
    server.proof.copied, server.proof.expected = True, [(PROGRAM, {"w": 1})]
    request = PushRequest(str(write_checkpoint(tmp_path / "here")))
    fleet = PushFleet("wide", (server.given,))
    run: Any = SimpleNamespace(request=request, fleet=fleet)
    checked: Any = SimpleNamespace(source=await read_source(request, fleet), draft=None)
    with pytest.raises(ServerError, match=r"does not hold what was sent: .* those of the check"):
        await _compare(run, checked, server)


def test_a_file_has_other_numbers_on_another_machine(tmp_path: Path) -> None:
    (shard,) = read_checkpoint(str(write_checkpoint(tmp_path / "here"))).shards
    copied = Path(shard.path).read_bytes()
    Path(shard.path).unlink()
    (tmp_path / "filler").touch()
    Path(shard.path).write_bytes(copied)
    with pytest.raises(CheckpointChanged):
        ShardFiles([shard])
    files = ShardFiles([shard], elsewhere=True)
    files.check(0)
    with Path(shard.path).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointChanged):
        files.check(0)
    with pytest.raises(CheckpointChanged):
        ShardFiles([shard], elsewhere=True)


async def test_a_machine_that_reads_again_is_held_to_what_the_others_have_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would notice in a push that is not verified."""
    stubs = Stubs(tmp_path, 3)
    there = write_checkpoint(tmp_path / "there", tiny_tensors(90), shards=2)
    elsewhere = read_checkpoint(str(there))
    servers = zip(stubs.fleet.servers, (A, B, A), strict=True)
    fleet = replace(stubs.fleet, servers=tuple(replace(one, node=node) for one, node in servers))
    spawn = SenderProcess.spawn

    async def spawn_there(*named: Any, node: Node | None = None) -> SenderProcess:
        sender = await spawn(*named)
        if node == B:
            begin = sender.open
            monkeypatch.setattr(
                sender, "open", lambda **more: begin(**{**more, "checkpoint": elsewhere})
            )
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn_there)
    stubs.fail_update(1, calls=[2])
    request = PushRequest(str(stubs.new), transport="shm", verify=False)
    async with stubs.client() as client:
        with pytest.raises(PushError, match="has read other bytes than the first") as caught:
            await push(request, fleet, client=client, observer=Recorder())
    states = [server["state"] for server in caught.value.details["servers"]]
    assert states == ["ready", "quarantined", "ready"]
    assert [engine.paused for engine in stubs.engines] == [False, True, False]
    assert stubs.engines[0].digest == stubs.engines[2].digest
