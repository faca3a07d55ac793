"""The sender process of a push, in the same process: `SenderProcess` as a delivery sees it.

It reads the real files when its turn comes, at its own pace, and dies with its parent.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.header import FileIdentity
from skyctl.transfer.plan import ChunkPlan
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened, SenderFailed
from tests.simulation.kernel import Process, current

if TYPE_CHECKING:
    pass


@dataclass
class Memory:
    """What servers find at a sender: its session, and the tensors in each of its slots."""

    session: str
    slots: dict[int, dict[str, int]] = field(default_factory=dict)


class SimSender:
    """See `sender_client.SenderProcess`."""

    world: Any

    def __init__(self, process: Process) -> None:
        self.process = process
        self.failure: SenderFailed | None = None
        self._filled: dict[int, Filled] = {}
        self._changed = asyncio.Condition()
        self._released = 0
        self._memory = Memory("")
        self._opened = False

        def ended() -> None:
            self.world.memories.pop(process.pid, None)

        process.on_death.append(ended)
        parent = process.parent
        assert parent is not None

        def told() -> None:
            if self.failure is None:
                self.failure = SenderFailed("the sender ended with code -9")
            self._telling = asyncio.ensure_future(self._tell())

        def hear() -> None:
            self.world.loop.call_later(0.001, told, context=parent.context)

        process.on_death.append(hear)

    @classmethod
    async def spawn(
        cls, python: str, nccl_settings: Mapping[str, str] | None = None, *, node: None = None
    ) -> SimSender:
        parent = current()
        await asyncio.sleep(cls.world.dice.random() * 0.02)
        process = cls.world.kernel.spawn("sender", None, parent=parent, dies_with_parent=True)
        return cls(process)

    async def open(
        self,
        *,
        session: str,
        checkpoint: Checkpoint,
        plan: ChunkPlan,
        slots: int,
        **_: Any,
    ) -> None:
        self._filled.clear()
        self._released = 0
        self._memory = self.world.memories[self.process.pid] = Memory(session)
        self._read = self.world.loop.create_task(
            self._fill(checkpoint, plan, slots), context=self.process.context
        )

    async def _fill(self, checkpoint: Checkpoint, plan: ChunkPlan, slots: int) -> None:
        """In the sender's own process."""
        dice = self.world.dice
        await asyncio.sleep(0.05 + dice.random() * 0.3)
        self._opened = True
        await self._tell()
        for chunk in plan.chunks:
            while chunk.index - self._released >= slots:
                async with self._changed:
                    await self._changed.wait()
            slot = chunk.index % slots
            self._memory.slots[slot] = {}
            await asyncio.sleep(dice.random() * (0.5 if dice.random() < 0.1 else 0.02))
            crcs = []
            for placed in chunk.placed:
                shard = checkpoint.shards[placed.tensor.shard]
                with open(shard.path, "rb") as file:  # noqa: ASYNC230, PTH123 - at one instant
                    file.seek(placed.tensor.begin)
                    crcs.append(zlib.crc32(file.read(placed.tensor.nbytes)))
                self._memory.slots[slot][placed.tensor.name] = crcs[-1]
            for shard in checkpoint.shards:
                status = os.stat(shard.path)  # noqa: PTH116
                if FileIdentity.of_status(status) != shard.identity:
                    self.failure = SenderFailed(f"{shard.path} changed during the push")
                    self.failure.final = True
                    await self._tell()
                    self.world.kernel.die("ends: the checkpoint changed")
            self._filled[chunk.index] = Filled(chunk.index, slot, tuple(crcs))
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @property
    def healthy(self) -> bool:
        return self.failure is None and not self.process.dead

    @property
    def pid(self) -> int:
        return self.process.pid

    async def opened(self, *, timeout_s: float) -> Opened:
        await self._until(lambda: self._opened, timeout_s, "opened")
        return Opened({"pid": self.pid, "fds": [0]}, False)

    async def filled(self, chunk: int, *, timeout_s: float) -> Filled:
        await self._until(lambda: chunk in self._filled, timeout_s, "filled")
        return self._filled[chunk]

    async def join(self, *, timeout_s: float) -> None: ...

    async def send(self, filled: Filled, size: int, *, timeout_s: float) -> None: ...

    async def free_slots(self, *, timeout_s: float) -> None: ...

    async def release(self, chunk: int) -> None:
        self._filled.pop(chunk, None)
        self._released = max(self._released, chunk + 1)
        await self._tell()

    def kill(self, reason: str) -> None:
        if self.failure is None:
            self.failure = SenderFailed(reason)
        self.world.kernel.kill(self.process)

    async def close(self) -> None:
        await asyncio.sleep(0.001)
        self.world.kernel.kill(self.process, "is closed")

    async def _until(self, holds: Any, timeout_s: float, event: str) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: holds() or self.failure)
        except TimeoutError:
            self.kill(f"the sender did not say {event!r} in {timeout_s:g} s")
        if not holds():
            assert self.failure is not None
            raise self.failure
