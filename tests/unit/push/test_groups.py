"""What a collective transport asks of workers around its group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.request import PushFleet, Timeouts
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.sender_client import SenderFailed, SenderProcess
from skyctl.transfer.sender_pool import SenderPool
from skyctl.transfer.transports.base import Transport
from skyctl.transfer.transports.nccl import TRANSPORT
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.deliveries import Ipc, ReadySender, site


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


async def pushed(pool: SenderPool, transport: Transport, checkpoint: Path, instance: str) -> None:
    """Push into one server, whose process is this one."""
    read = read_checkpoint(str(checkpoint))
    one = site(Server(), instance=instance)
    delivery = ChunkDelivery(
        transport,
        read,
        plan_chunks(read.tensors, 1024),
        PushFleet("demo", (one.given,)),
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
    senders: list[ReadySender] = []

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        senders.append(ReadySender())
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
    sender = ReadySender()

    async def spawn(*_: Any, **__: Any) -> ReadySender:
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    read = read_checkpoint(str(write_checkpoint(tmp_path / "a")))
    server = Server()
    one = site(server, instance="1@1")
    fleet = PushFleet("demo", (one.given,))
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
        PushFleet("demo", (), timeouts=Timeouts(update_s=5.0)),
        senders=SimpleNamespace(),  # type: ignore[arg-type]
    )
    await delivery.finish([one], lambda: "v1")
    assert server.asked == asked
