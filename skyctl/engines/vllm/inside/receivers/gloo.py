"""Receive by broadcast from the sender over TCP: the CPU twin of NCCL."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from skyctl.wire.gloo_group import form_group
from skyctl.wire.group_store import GroupStoreClient
from skyctl.wire.messages import ChunkUpdate, ReceiverInit


class GlooReceiver:
    """One rank of the sender's group, which every rank has joined once this is made.

    Endpoint: {"host", "port", "secret", "rank_offset", "world_size", "rendezvous_timeout_s",
    "update_timeout_s"}. The sender is rank 0; this server's workers take ranks from `rank_offset`.
    """

    def __init__(self, init: ReceiverInit, rank: int) -> None:
        endpoint = init.endpoint
        secret, timeout_s = bytes.fromhex(endpoint["secret"]), endpoint["rendezvous_timeout_s"]
        store = GroupStoreClient(
            endpoint["host"], int(endpoint["port"]), secret, timeout_s=float(timeout_s)
        )
        try:
            self._group: dist.ProcessGroupGloo | None = form_group(
                store,
                secret,
                address=store.address,
                rank=int(endpoint["rank_offset"]) + rank,
                world_size=int(endpoint["world_size"]),
                timeout_s=float(timeout_s),
            )
        finally:
            store.close()
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


RECEIVER = GlooReceiver
