"""A sender leaves free what the servers on its GPUs take the first time, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.push.delivery import ChunkDelivery
from skyctl.push.request import PushFleet
from skyctl.push.worker_memory import worker_bytes
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import BATCH_BYTES
from skyctl.transfer.sender_pool import Lease
from skyctl.transfer.transports.nccl import NcclTransport
from skyctl.wire.layouts import Copy, Program
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.deliveries import Ipc, ReadySender, site

CHUNK = 1024


class Senders:
    """The pool: always this one."""

    def __init__(self) -> None:
        self.lease = Lease(ReadySender(), "", "s")  # type: ignore[arg-type]

    def on(self, _: object) -> Senders:
        return self

    async def take(self, *_: Any, **__: Any) -> Lease:
        return self.lease


class Server:
    async def update_weights(self, info: Mapping[str, Any], **_: Any) -> None: ...


async def pushed(
    senders: Senders, directory: Path, instances: tuple[str, str], chunk_size: int = CHUNK
) -> int:
    """Push into two servers on one GPU; what was left free for each of them."""
    checkpoint = read_checkpoint(str(directory))
    plan = plan_chunks(checkpoint.tensors, chunk_size)
    sites = [
        site(Server(), name=f"demo-{n}", instance=instance) for n, instance in enumerate(instances)
    ]
    fleet = PushFleet("demo", tuple(site.given for site in sites))
    delivery = ChunkDelivery(Ipc(), checkpoint, plan, fleet, senders=senders)  # type: ignore[arg-type]
    await delivery.open(sites)
    await delivery.update(sites, lambda done: None)
    assert not any(site.failure for site in sites)
    reserved = senders.lease.sender.reserves[-1]  # type: ignore[attr-defined]
    assert reserved in (0, 2 * worker_bytes("ipc", plan))
    return int(reserved // 2)


async def test_processes_that_took_such_a_push_take_nothing_more(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    senders = Senders()
    assert await pushed(senders, tmp_path / "a", ("1@1", "2@1")) > 0
    assert await pushed(senders, tmp_path / "a", ("1@1", "2@1")) == 0
    assert await pushed(senders, tmp_path / "a", ("1@1", "3@9")) > 0  # a new process
    assert await pushed(senders, tmp_path / "a", ("1@1", "3@9"), 2 * CHUNK) > 0  # larger chunks


async def test_processes_of_which_nobody_knows_whether_they_are_the_same_may_take_it_again(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path / "a")
    senders = Senders()
    for _ in range(2):
        assert await pushed(senders, tmp_path / "a", ("1@1", "")) > 0


def test_a_sender_leaves_room_for_its_own_numbering_at_every_push() -> None:
    program = Program("layout", (), (Copy(0, 0, 4, 10, 0, 20, 8, 16),))
    delivery: Any = ChunkDelivery.__new__(ChunkDelivery)
    delivery._transport, delivery._distinct, delivery.one_reader = Ipc(), [program], None
    delivery._filling = lambda sites: "the same"
    lease: Any = SimpleNamespace(filled="the same")
    assert delivery._reserve_bytes([], lease) == 8 + 3 * 16 + 10 + BATCH_BYTES


async def test_a_sender_with_a_gpu_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "a")))
    sites = [site(Server(), instance="1@1")]
    senders = Senders()
    delivery = ChunkDelivery(
        NcclTransport(),
        checkpoint,
        plan_chunks(checkpoint.tensors, CHUNK),
        PushFleet("demo", tuple(site.given for site in sites)),
        senders=senders,  # type: ignore[arg-type]
    )
    await delivery.open(sites)
    assert senders.lease.sender.reserves == [0]  # type: ignore[attr-defined]
