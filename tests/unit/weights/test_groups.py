"""What a collective transport asks of workers around its group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.control.dialects import dialect_for
from skyctl.control.target import ServerTarget
from skyctl.weights.checkpoint import read_checkpoint
from skyctl.weights.delivery import ChunkDelivery
from skyctl.weights.plan import plan_chunks
from skyctl.weights.request import PushFleet, PushServer
from skyctl.weights.sender_client import Opened, SenderFailed, SenderProcess
from skyctl.weights.sender_pool import SenderPool
from skyctl.weights.sites import Site
from skyctl.weights.transports.base import Filled, Transport
from skyctl.weights.transports.ipc import TRANSPORT as IPC
from skyctl.weights.transports.nccl import TRANSPORT
from tests.unit.weights.checkpoints import write_checkpoint


class Server:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def extension_rpc(self, method: str, **_: Any) -> None:
        self.asked.append(method)

    async def init_weight_transfer(self, *_: Any, **__: Any) -> None:
        self.asked.append("init")

    async def update_weights(self, *_: Any, **__: Any) -> None: ...

    async def finish_weight_update(self, *_: Any, **__: Any) -> None:
        self.asked.append("finish")


class Sender:
    """Has every chunk at once, and counts the groups that it forms."""

    healthy = True
    failure: SenderFailed | None = None

    def __init__(self) -> None:
        self.joins = 0

    async def open(self, **_: Any) -> None: ...

    async def opened(self, **_: Any) -> Opened:
        return Opened({"host": "127.0.0.1", "port": 1}, staged_whole=True)

    async def filled(self, chunk: int, **_: Any) -> Filled:
        return Filled(chunk, chunk, (), {"ipc": []})

    async def join(self, **_: Any) -> None:
        self.joins += 1

    async def send(self, *_: Any, **__: Any) -> None: ...

    async def release(self, chunk: int) -> None: ...

    async def rest(self, **_: Any) -> None: ...

    async def close(self) -> None: ...


class Ipc(type(IPC)):  # type: ignore[misc]
    def update_info(self, *_: Any, **__: Any) -> Mapping[str, Any]:
        return {}


def site(server: Server, *, version: str = "0.32.0", instance: str = "") -> Site:
    target = ServerTarget("demo-0", "http://127.0.0.1:1")
    return Site(
        server=PushServer(target=target, gpus=(0,), instance=instance),
        vllm=server,  # type: ignore[arg-type]
        dialect=dialect_for(version),
        world_size=1,
        was_paused=False,
        old_version=None,
    )


async def pushed(pool: SenderPool, transport: Transport, checkpoint: Path, instance: str) -> None:
    """Push into one server, whose process is this one."""
    read = read_checkpoint(str(checkpoint))
    one = site(Server(), instance=instance)
    delivery = ChunkDelivery(
        transport,
        read,
        plan_chunks(read.tensors, 1024),
        PushFleet("demo", (one.server,)),
        senders=pool,
    )
    await delivery.open([one])
    await delivery.init([one])
    await delivery.update([one], lambda done: None)
    await delivery.close()
    assert not one.failure


@pytest.mark.parametrize(
    ("transport", "instances", "joins"),
    [
        (TRANSPORT, ("1@1", "1@1", "1@1"), [1]),
        (TRANSPORT, ("1@1", "2@9", "2@9"), [1, 1]),  # restarted after the first push
        (TRANSPORT, ("", ""), [1, 1]),  # attached: nobody knows whether it was restarted
        (Ipc(), ("1@1", "2@9", ""), [0]),  # has no group
    ],
    ids=["same", "restarted", "attached", "ipc"],
)
async def test_a_sender_forms_one_group_in_its_life(
    transport: Transport,
    instances: tuple[str, ...],
    joins: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    senders: list[Sender] = []

    async def spawn(*_: Any) -> Sender:
        senders.append(Sender())
        return senders[-1]

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    checkpoint = write_checkpoint(tmp_path / "a")
    pool = SenderPool()
    for instance in instances:
        await pushed(pool, transport, checkpoint, instance)
    assert [sender.joins for sender in senders] == joins


async def test_servers_are_not_asked_to_meet_a_sender_that_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would wait for it for minutes."""
    sender = Sender()

    async def spawn(*_: Any) -> Sender:
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    read = read_checkpoint(str(write_checkpoint(tmp_path / "a")))
    server = Server()
    one = site(server, instance="1@1")
    fleet = PushFleet("demo", (one.server,))
    plan = plan_chunks(read.tensors, 1024)
    delivery = ChunkDelivery(TRANSPORT, read, plan, fleet, senders=SenderPool())
    await delivery.open([one])
    sender.failure = SenderFailed("the sender ended with code -9")
    await delivery.init([one])
    assert one.failure == "the sender ended with code -9" and server.asked == []


@pytest.mark.parametrize(
    ("version", "asked"),
    [("0.26.0", ["finish", "skyctl_free_cached"]), ("0.32.0", ["finish"])],
)
async def test_buffers_that_vllm_would_not_use_again_are_given_back(
    version: str, asked: list[str]
) -> None:
    server = Server()
    one = site(server, version=version)
    delivery = ChunkDelivery(
        TRANSPORT,
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(update_timeout_s=5.0),  # type: ignore[arg-type]
        senders=SimpleNamespace(),  # type: ignore[arg-type]
    )
    await delivery.finish([one], lambda: "v1")
    assert server.asked == asked
