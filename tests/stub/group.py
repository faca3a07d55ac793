"""A stub's place in a sender's gloo group, taken by the receiver that vLLM's workers have."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any

from skyctl.wire.messages import ChunkUpdate, ReceiverInit
from tests.stub.rows import KEPT_BYTES, Contents
from tests.stub.state import EngineRefused, StubEngine

if TYPE_CHECKING:
    from skyctl.engines.vllm.inside.receivers import Receiver


class StubGroup:
    """What an engine is told of a push, and what arrives there with `joins`; else it answers, and
    is not in the group."""

    def __init__(self, engine: StubEngine) -> None:
        self.joins = False
        self._engine = engine
        self._receiver: Receiver | None = None

    async def init(self, info: dict[str, Any]) -> None:
        self.leave()
        self._engine.init_transfer(info)
        if self.joins and info["transport"] == "gloo":
            self._receiver = await asyncio.to_thread(_open, ReceiverInit(**info))

    async def update(self, info: dict[str, Any]) -> None:
        received: Contents = {}
        if self._receiver is not None:
            try:
                received = await asyncio.to_thread(_receive, self._receiver, ChunkUpdate(**info))
            except RuntimeError as error:
                self._engine.fail_update()
                raise EngineRefused(f"Worker failed with error '{error}'") from error
        self._engine.update(info)
        self._engine.contents |= received

    def leave(self) -> None:
        """As a worker that dies."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


def _open(init: ReceiverInit) -> Receiver:
    from skyctl.engines.vllm.inside.receivers import open_receiver  # torch

    try:
        return open_receiver(init, 0)
    except (OSError, RuntimeError) as error:
        raise EngineRefused(f"Worker failed with error '{error}'") from error


def _receive(receiver: Receiver, update: ChunkUpdate) -> Contents:
    found: Contents = {}
    for (name, tensor), dtype, expected in zip(
        receiver.receive(update), update.dtype_names, update.crc32, strict=True
    ):
        data = bytes(tensor.reshape(-1).view(dtype=_byte()).numpy())
        if zlib.crc32(data) != expected:
            raise RuntimeError(f"{name} was damaged on its way")
        if len(data) <= KEPT_BYTES:
            found[name] = (dtype, data)
    return found


def _byte() -> Any:
    import torch

    return torch.uint8
