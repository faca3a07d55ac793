"""What a delivery works with in tests: a sender that is always ready, and sites without servers."""

from __future__ import annotations

from typing import Any

from skyctl.engines.vllm.engine import dialect_for
from skyctl.http.target import ServerTarget
from skyctl.launch.base import Node
from skyctl.push.request import PushServer
from skyctl.push.servers import Before, PushedServer
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened, SenderFailed
from skyctl.transfer.transports.ipc import IpcTransport


class ReadySender:
    """Has every chunk at once; remembers what it was told to leave free, and counts its groups."""

    healthy = True
    failure: SenderFailed | None = None

    def __init__(self) -> None:
        self.reserves: list[int] = []
        self.carriers: list[Any] = []  # what it was told of them: None where it has one
        self.warm_by: str = ""
        self.paces: list[int | None] = []
        self.hurried = False
        self.exports = True
        self.joins = 0
        self.relays: list[tuple[int, int, str]] = []  # rank, size and id of its groups
        self.relay_ranks: list[int | None] = []  # one for each push

    async def warm(self, *, transport: str, **_: Any) -> None:
        self.warm_by = transport

    async def warmed(self, **_: Any) -> None: ...

    async def open(
        self,
        *,
        reserve_bytes: int,
        carrier: Any = None,
        bytes_per_s: int | None = None,
        exports: bool = True,
        relay_rank: int | None = None,
        **_: Any,
    ) -> None:
        self.relay_ranks.append(relay_rank)
        self.exports = exports
        self.paces.append(bytes_per_s)
        self.reserves.append(reserve_bytes)
        self.carriers.append(carrier)

    async def opened(self, **_: Any) -> Opened:
        return Opened({"master_address": "127.0.0.1", "master_port": 1}, staged_whole=True)

    async def filled(self, chunk: int, **_: Any) -> Filled:
        return Filled(chunk, chunk, ())

    async def relay(self, rank: int, world_size: int, unique_id: str = "") -> None:
        self.relays.append((rank, world_size, unique_id))

    async def relaying(self, **_: Any) -> str:
        return f"group {len(self.relays)}"

    async def relayed(self, **_: Any) -> None: ...

    async def lift_pace(self) -> None:
        self.hurried = True

    async def join(self, **_: Any) -> None:
        self.joins += 1

    async def send(self, *_: Any, **__: Any) -> None: ...

    async def release(self, chunk: int) -> None: ...

    async def free_slots(self, **_: Any) -> None: ...

    async def close(self) -> None: ...


class Ipc(IpcTransport):
    """CUDA IPC, but for the handles."""

    def update_info(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def site(
    control: Any,
    *,
    name: str = "demo-0",
    gpus: tuple[int, ...] = (0,),
    instance: str = "",
    version: str = "0.32.0",
    node: Node | None = None,
) -> PushedServer:
    """One server of one worker, with these calls."""
    return PushedServer(
        PushServer(
            ServerTarget(name, "http://127.0.0.1:1"), gpus=gpus, instance=instance, node=node
        ),
        control,
        Before(dialect=dialect_for(version)),
    )
