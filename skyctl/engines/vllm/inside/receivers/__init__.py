"""Receiving ends inside vLLM's workers, one module per mechanism, named after its sender."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from skyctl.wire.messages import ChunkUpdate, ReceiverInit

if TYPE_CHECKING:
    import torch

TRANSPORTS = ("shm", "gloo")


class Receiver(Protocol):
    """Fetches chunks from one sender. Lives from init to the next init, finish or shutdown."""

    def receive(self, update: ChunkUpdate) -> list[tuple[str, torch.Tensor]]:
        """The chunk's tensors by checkpoint name, in CPU memory of their own, not yet checked."""

    def close(self) -> None:
        """Release the sender; may be called twice."""


def open_receiver(init: ReceiverInit, rank: int) -> Receiver:
    """Connect to the sender. `rank` is this worker's number within its server, from 0.

    Raises:
        ValueError: no such transport.
    """
    if init.transport not in TRANSPORTS:
        names = ", ".join(TRANSPORTS)
        raise ValueError(f"transport {init.transport!r} is unknown to this server; it has {names}")
    module: Any = importlib.import_module(f"skyctl.engines.vllm.inside.receivers.{init.transport}")
    receiver: Receiver = module.RECEIVER(init, rank)
    return receiver
