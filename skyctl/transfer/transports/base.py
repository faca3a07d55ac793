"""What a transport is: the parent's half shapes payloads, the sender's half (`transfer/carrier.py`)
moves bytes.

One module per mechanism holds both: `TRANSPORT` (used by the push, imports no torch) and
`open_carrier` (used inside the sender process). A new mechanism is one such module, its name in
`skyctl/transfer/transports/__init__.py`, and a receiver in `skyctl/engines/vllm/inside/receivers`
unless vLLM brings one.

The store where ranks over NCCL find each other is on loopback, and closed once they have: torch's
TCPStore serves every process that connects, and vLLM unpickles what it holds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyctl.checkpoints.header import torch_name
from skyctl.engines.dialect import Dialect, TensorHeaders
from skyctl.transfer.plan import ALIGNMENT, Chunk, ChunkPlan, Packing
from skyctl.transfer.reader import Filled
from skyctl.wire.messages import ChunkUpdate, ReceiverInit


@dataclass(frozen=True)
class Session:
    """One attempt at carrying a plan over. `endpoint` is what the sender said of itself;
    `world_size` counts the sender and every worker."""

    name: str
    plan: ChunkPlan
    world_size: int
    endpoint: Mapping[str, Any]


class Transport(Protocol):
    """The parent's half. What is said here is true of skyctl's own receivers, on CPU.

    Attributes:
        collective: sender and servers must act at the same time, both at init (the sender joins)
            and at each update (it sends); one that fails takes the others with it.
        resident: the sender is kept for the next push: what it holds is dear to set up.
        one_update: all chunks travel within a single update call, which receives one while it
            loads the other; otherwise each chunk is an update of its own.
        ordered: the receiver insists on chunks in their order.
        shares_gpus: the sender's slots lie on the GPUs of the servers.
        leaves_group: vLLM's workers are still in the last sender's group when a new one forms its
            own, and must be told to leave it.
    """

    name: str
    collective: bool = False
    resident: bool = False
    one_update: bool = False
    ordered: bool = True
    shares_gpus: bool = False
    leaves_group: bool = False
    packing: Packing = "fit"
    alignment: int = ALIGNMENT

    def speaking(self, dialect: Dialect) -> Transport:
        """As it is for servers of this dialect."""
        return self

    def sender_options(
        self,
        *,
        world_size: int,
        server_gpus: Sequence[Sequence[int]],
        sender_gpu: int,
        rendezvous_timeout_s: float,
        update_timeout_s: float,
        address: str,
        across: bool,
    ) -> dict[str, Any]:
        """What the carrier is opened with. `server_gpus` are each server's physical GPUs;
        `sender_gpu` is one that no server uses, -1 when there is none. `address` is that of the
        sender's machine, by which all servers reach it; `across`: some may be on others."""
        return {}

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        """init_info of one server, whose first worker has rank `rank_offset`."""
        rank = {"rank_offset": rank_offset} if self.collective else {}
        return receiver_init(self.name, session, {**session.endpoint, **rank})

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, server: int, dialect: Dialect
    ) -> dict[str, Any]:
        """update_info of one chunk (of all of them as one, with `one_update`) for server number
        `server` of the session."""
        return chunk_update(chunk, filled)


def rank_offsets(world_sizes: Sequence[int]) -> tuple[list[int], int]:
    """Rank offset of each server and the size of the whole group.

    `world_sizes` are the servers' workers (TP x PP x DP), a DP deployment once. The sender is
    rank 0, so offsets start at 1.
    """
    offsets, following = [], 1
    for size in world_sizes:
        if size < 1:
            raise ValueError(f"a server has at least one worker, not {size}")
        offsets.append(following)
        following += size
    return offsets, following


def tensor_headers(chunk: Chunk) -> TensorHeaders:
    """A chunk's tensors as vLLM's own engines are told of them."""
    tensors = [placed.tensor for placed in chunk.placed]
    return TensorHeaders(
        names=[tensor.name for tensor in tensors],
        dtypes=[torch_name(tensor.dtype, tensor.name) for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
    )


def chunk_update(chunk: Chunk, filled: Filled) -> dict[str, Any]:
    """update_info of skyctl's own engine (`wire/messages.py`)."""
    headers = tensor_headers(chunk)
    return vars(
        ChunkUpdate(
            chunk=chunk.index,
            slot=filled.slot,
            size=chunk.size,
            names=list(headers.names),
            dtype_names=list(headers.dtypes),
            shapes=[list(shape) for shape in headers.shapes],
            offsets=[placed.offset for placed in chunk.placed],
            crc32=list(filled.crc32),
        )
    )


def receiver_init(transport: str, session: Session, endpoint: dict[str, Any]) -> dict[str, Any]:
    """init_info of skyctl's own engine (`wire/messages.py`)."""
    return vars(
        ReceiverInit(
            transport=transport,
            session=session.name,
            tensors=[tensor.name for tensor in session.plan.tensors],
            slot_bytes=session.plan.slot_bytes,
            endpoint=endpoint,
        )
    )


HOST = "127.0.0.1"


class Rendezvous:
    """A listening socket on an ephemeral port of loopback, to be handed to a TCPStore."""

    def __init__(self, world_size: int) -> None:
        self.socket = socket.socket()
        self.socket.bind((HOST, 0))
        self.socket.listen(world_size + 8)
        self.port: int = self.socket.getsockname()[1]
        self._descriptor = self.socket.fileno()

    def close(self, store: Any) -> None:
        """Refuse connections from now on to `store`, which took the socket over.

        The store polls the descriptor by its number: what takes its place never becomes ready.
        """
        silent = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(silent, self._descriptor, inheritable=False)
        os.close(silent)
        # a poll under way keeps the old socket open: once this is answered it is over
        store.set("closed", "1")
        store.get("closed")
