"""Receive by broadcast from the sender over TCP: the CPU twin of NCCL.

A process group of its own, next to whatever groups vLLM has: torch's global group is not touched.
"""

from __future__ import annotations

import math
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from skyctl.engines.vllm.inside.wire import ChunkUpdate, ReceiverInit


def open_receiver(init: ReceiverInit, rank: int) -> GlooReceiver:
    """Join the sender's group; returns when every rank has.

    Endpoint: {"host", "port", "rank_offset", "world_size", "rendezvous_timeout_s",
    "update_timeout_s"}. The sender is rank 0; this server's workers take ranks from `rank_offset`.
    """
    return GlooReceiver(init, int(init.endpoint["rank_offset"]) + rank)


class GlooReceiver:
    """One rank of the sender's group."""

    def __init__(self, init: ReceiverInit, rank: int) -> None:
        endpoint = init.endpoint
        address = (endpoint["host"], int(endpoint["port"]))
        # it listens before servers are told of it: nobody there means that the sender has died,
        # and a TCPStore would go on trying to its deadline
        socket.create_connection(address, float(endpoint["rendezvous_timeout_s"])).close()
        store = dist.TCPStore(
            *address,
            int(endpoint["world_size"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=float(endpoint["rendezvous_timeout_s"])),
        )
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=float(endpoint["rendezvous_timeout_s"]))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=endpoint["host"])]
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
            dist.PrefixStore(init.session, store), rank, int(endpoint["world_size"]), options
        )
        self._timeout = timedelta(seconds=float(endpoint["update_timeout_s"]))
        self._group.set_timeout(self._timeout)
        self._slot_bytes = init.slot_bytes
        self._buffer: torch.Tensor | None = None

    def receive(self, update: ChunkUpdate) -> list[tuple[str, torch.Tensor]]:
        """Take part in one broadcast; the tensors are copies, the buffer is reused.

        Raises:
            RuntimeError: the sender is gone, or the deadline passed.
        """
        if self._group is None:
            raise RuntimeError("the group with the sender is closed")
        if not 0 < update.size <= self._slot_bytes:
            raise RuntimeError(f"chunk {update.chunk} has {update.size} bytes, over the slot size")
        if self._buffer is None:
            self._buffer = torch.empty(self._slot_bytes, dtype=torch.uint8)
        chunk = self._buffer[: update.size]
        self._group.broadcast(chunk, 0).wait(self._timeout)
        tensors = []
        for name, dtype_name, shape, offset in zip(
            update.names, update.dtype_names, update.shapes, update.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            nbytes = math.prod(shape) * dtype.itemsize
            # cloned: the layerwise loader keeps tensors until their layer is complete
            piece = chunk[offset : offset + nbytes].clone()
            if piece.numel() != nbytes:
                raise RuntimeError(f"{name} reaches past the end of chunk {update.chunk}")
            tensors.append((name, piece.view(dtype).reshape(shape)))
        return tensors

    def close(self) -> None:
        """Leave the group and free the buffer."""
        group, self._group, self._buffer = self._group, None, None
        if group is not None:
            group.shutdown()
