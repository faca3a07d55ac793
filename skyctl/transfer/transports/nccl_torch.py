"""NCCL to servers whose workers join groups of torch.distributed: SGLang's.

The sender is rank 0 of a group formed as SGLang's `init_custom_process_group` forms it
(`srt/utils/common.py`, 0.5.14): a store under the group's name, then torch's own helper. So both
sides must run the same torch, which they do: the sender runs in the servers' interpreter. Each
chunk is a bucket, tensors without padding, and one broadcast within one update call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from skyctl.engines.base import GROUP_PREFIX
from skyctl.errors import PreflightError
from skyctl.transfer.gpu.carrier import GpuCarrier
from skyctl.transfer.transports.rendezvous import HOST, Rendezvous


def group_name(session: str) -> str:
    """The name of the group that the sender of a session forms."""
    return GROUP_PREFIX + session


class TorchNcclCarrier(GpuCarrier):
    """Rank 0 on a GPU that no worker uses. The group lasts as long as the process; NCCL connects
    its ranks in the first broadcast.
    """

    def __init__(self, session: str, options: dict[str, Any]) -> None:
        import torch

        if not torch.distributed.is_nccl_available():
            raise PreflightError(
                "the sender: torch was built without NCCL", hint="push with --transport disk"
            )
        super().__init__([int(options["gpu"])], options["server_gpus"])
        self._group = TorchGroup(
            group_name(session),
            int(options["world_size"]),
            timeout_s=float(options["rendezvous_timeout_s"]),
        )

    def endpoint(self) -> dict[str, Any]:
        return {"master_address": HOST, "master_port": self._group.port}

    def join(self) -> None:
        """Form the group: every worker of every server must be in its init call, or come to it."""
        self._group.form()

    def send(self, slot: int, size: int) -> None:
        import torch

        device = self.devices[0]
        self._group.broadcast(self.slots.view(device, slot)[:size])
        torch.cuda.current_stream(device).synchronize()


class TorchGroup:
    """A group of torch.distributed in which this process is rank 0, and the store where ranks find
    each other.

    The store asks for no password: it listens on loopback, and only until every rank is there.
    """

    def __init__(
        self, name: str, world_size: int, *, timeout_s: float, backend: str = "nccl"
    ) -> None:
        self._name = name
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = backend
        self._rendezvous = Rendezvous(world_size)
        self._group: Any = None

    @property
    def port(self) -> int:
        return self._rendezvous.port

    def form(self) -> None:
        """Wait until every rank has come to the store, and close it to all others."""
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.distributed_c10d import (
            Backend,
            _new_process_group_helper,
            _world,
            default_pg_timeout,
        )

        store = TCPStore(
            HOST,
            self.port,
            self._world_size,
            is_master=True,
            timeout=self._timeout,
            master_listen_fd=self._rendezvous.socket.detach(),
            use_libuv=False,
        )
        self._rendezvous.close(store)
        self._group, _ = _new_process_group_helper(
            self._world_size,
            0,
            [],
            Backend(self._backend),
            PrefixStore(self._name, store),
            group_name=self._name,
            timeout=default_pg_timeout,
        )
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._world_size)}

    def broadcast(self, tensor: Any) -> None:
        """Send a tensor to all other ranks; on a GPU, in the order of its current stream."""
        import torch.distributed as dist

        dist.broadcast(tensor, src=0, group=self._group)
