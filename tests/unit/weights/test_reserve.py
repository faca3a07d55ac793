"""A sender leaves free what the servers on its GPUs take the first time, and only then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.control.dialects import dialect_for
from skyctl.control.target import ServerTarget
from skyctl.weights.checkpoint import read_checkpoint
from skyctl.weights.delivery import ChunkDelivery
from skyctl.weights.plan import plan_chunks
from skyctl.weights.request import PushFleet, PushServer
from skyctl.weights.sender_client import Opened
from skyctl.weights.sender_pool import Lease
from skyctl.weights.sites import Site
from skyctl.weights.transports.base import Filled
from skyctl.weights.transports.ipc import IpcTransport
from skyctl.weights.transports.nccl import NcclTransport
from skyctl.weights.worker_memory import worker_bytes
from tests.unit.weights.checkpoints import write_checkpoint

CHUNK = 1024


class Sender:
    """Has every chunk at once; remembers what it was told to leave free."""

    def __init__(self) -> None:
        self.reserves: list[int] = []

    async def open(self, *, reserve_bytes: int, **_: Any) -> None:
        self.reserves.append(reserve_bytes)

    async def opened(self, **_: Any) -> Opened:
        return Opened({"host": "127.0.0.1", "port": 1}, staged_whole=True)

    async def filled(self, chunk: int, **_: Any) -> Filled:
        return Filled(chunk, chunk, ())

    async def release(self, chunk: int) -> None: ...


class Senders:
    """The pool: always this one."""

    def __init__(self) -> None:
        self.lease = Lease(Sender(), "", "s")  # type: ignore[arg-type]

    async def take(self, *_: Any, **__: Any) -> Lease:
        return self.lease


class Ipc(IpcTransport):
    def update_info(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class Server:
    async def update_weights(self, info: Mapping[str, Any], **_: Any) -> None: ...


def site(name: str, gpus: tuple[int, ...], instance: str) -> Site:
    target = ServerTarget(name, "http://127.0.0.1:1")
    return Site(
        server=PushServer(target, gpus=gpus, instance=instance),
        vllm=Server(),  # type: ignore[arg-type]
        dialect=dialect_for("0.32.0"),
        world_size=1,
        was_paused=False,
        old_version=None,
    )


async def pushed(
    senders: Senders, directory: Path, instances: tuple[str, str], chunk_size: int = CHUNK
) -> int:
    """Push into two servers on one GPU; what was left free for each of them."""
    checkpoint = read_checkpoint(str(directory))
    plan = plan_chunks(checkpoint.tensors, chunk_size)
    sites = [site(f"demo-{n}", (0,), instance) for n, instance in enumerate(instances)]
    fleet = PushFleet("demo", tuple(one.server for one in sites))
    delivery = ChunkDelivery(Ipc(), checkpoint, plan, fleet, senders=senders)  # type: ignore[arg-type]
    await delivery.open(sites)
    await delivery.update(sites, lambda done: None)
    assert not any(one.failure for one in sites)
    told = senders.lease.sender.reserves[-1]  # type: ignore[attr-defined]
    assert told in (0, 2 * worker_bytes("ipc", plan))
    return int(told // 2)


async def test_processes_that_took_such_a_push_take_nothing_more(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    senders = Senders()
    assert await pushed(senders, tmp_path / "a", ("1@1", "2@1")) > 0
    assert await pushed(senders, tmp_path / "a", ("1@1", "2@1")) == 0
    assert await pushed(senders, tmp_path / "a", ("1@1", "3@9")) > 0  # a new process
    assert await pushed(senders, tmp_path / "a", ("1@1", "3@9"), 2 * CHUNK) > 0  # larger chunks


async def test_a_sender_with_a_gpu_of_its_own_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "a")))
    sites = [site("demo-0", (0,), "1@1")]
    senders = Senders()
    delivery = ChunkDelivery(
        NcclTransport(),
        checkpoint,
        plan_chunks(checkpoint.tensors, CHUNK),
        PushFleet("demo", tuple(one.server for one in sites)),
        senders=senders,  # type: ignore[arg-type]
    )
    await delivery.open(sites)
    assert senders.lease.sender.reserves == [0]  # type: ignore[attr-defined]
