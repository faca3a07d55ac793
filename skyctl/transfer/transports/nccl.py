"""NCCL broadcast from a GPU of the sender's own to every worker of every server.

Speaks to vLLM's native engine (`distributed/weight_transfer/nccl_engine.py`, packed), and to
engines whose workers take buckets (by torch.distributed). The sender is rank 0; each server's
workers take consecutive ranks from its own rank_offset. vLLM's workers cut the stream of tensors
into buffers by themselves, so the chunk plan follows their rule ("overflow").
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from typing import Any

from skyctl.engines.dialect import GROUP_PREFIX, Dialect, GroupJoin, PackedBuffers
from skyctl.errors import PreflightError
from skyctl.transfer.gpu.carrier import DeviceCarrier
from skyctl.transfer.plan import Chunk, Packing
from skyctl.transfer.reader import Filled
from skyctl.transfer.transports.base import HOST, Rendezvous, Session, Transport, tensor_headers
from skyctl.wire.nccl import nccl_problem, new_unique_id

WORKER_BUFFERS = 2


class NcclTransport(Transport):
    """Every worker of every server takes part in each broadcast.

    With `buckets` each chunk is an update of its own, and servers leave the last sender's group by
    themselves when they join another (`TorchNcclCarrier`).
    """

    name = "nccl"
    collective = True
    resident = True
    alignment = 1  # neither vLLM's packed format nor a bucket has padding

    def __init__(self, *, buckets: bool = False) -> None:
        self._buckets = buckets
        self.one_update = not buckets  # vLLM's workers receive one buffer while they load the other
        self.leaves_group = not buckets
        self.packing: Packing = "bucket" if buckets else "overflow"

    def speaking(self, dialect: Dialect) -> Transport:
        return NcclTransport(buckets=True) if dialect.takes_buckets else self

    def sender_options(
        self,
        world_size: int,
        *,
        server_gpus: Sequence[Sequence[int]],
        sender_gpu: int,
        rendezvous_timeout_s: float,
        across: bool,
        **_: Any,
    ) -> dict[str, Any]:
        return {
            "world_size": world_size,
            "gpu": sender_gpu,
            # on another machine these are other GPUs
            "server_gpus": [[] if across else list(gpus) for gpus in server_gpus],
            "rendezvous_timeout_s": rendezvous_timeout_s,
            "by_id": across,
            "by_torch": self._buckets,
        }

    def init_info(self, session: Session, *, rank_offset: int, dialect: Dialect) -> dict[str, Any]:
        join = GroupJoin(
            rank_offset, session.world_size, name=group_name(session.name), **session.endpoint
        )
        return dialect.nccl_init_info(join, buffers=self._buffers(session))

    def update_info(
        self, session: Session, chunk: Chunk, filled: Filled, *, server: int, dialect: Dialect
    ) -> dict[str, Any]:
        return dialect.nccl_update_info(
            tensor_headers(chunk), buffers=self._buffers(session), group=group_name(session.name)
        )

    @staticmethod
    def _buffers(session: Session) -> PackedBuffers:
        return PackedBuffers(session.plan.chunk_size, WORKER_BUFFERS)


TRANSPORT = NcclTransport()


def open_carrier(session: str, options: dict[str, Any]) -> DeviceCarrier:
    """The sender's half. Imports torch, and vLLM if it sends to vLLM."""
    if options["by_torch"]:
        return TorchNcclCarrier(session, options)
    return NcclCarrier(options)


class NcclCarrier(DeviceCarrier):
    """Rank 0 of the group on a GPU that no worker uses. The group lasts as long as the carrier.

    On one machine ranks find each other in a store. It serves pickled objects to every process
    that connects: it listens on loopback only. Over machines (`by_id`) NCCL's own unique id takes
    its place, which servers are told in their init call.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        # vLLM takes seconds to import: do it here, not while servers are frozen
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        if problem := nccl_problem():
            raise PreflightError(
                f"the sender: {problem}",
                hint="install the nvidia-nccl package that this vLLM asks for, or set "
                "VLLM_NCCL_SO_PATH to its libnccl",
            )
        device = int(options["gpu"])
        super().__init__([device], options["server_gpus"])
        self._new_communicator = PyNcclCommunicator
        self._world_size = int(options["world_size"])
        self._rendezvous_s = float(options["rendezvous_timeout_s"])
        self._unique_id = new_unique_id() if options["by_id"] else b""
        self._rendezvous = None if self._unique_id else Rendezvous(self._world_size)
        self._stream = torch.cuda.Stream(device=device)
        self._communicator: Any = None

    def endpoint(self) -> dict[str, Any]:
        if self._rendezvous is None:
            return {"unique_id": base64.b64encode(self._unique_id).decode("ascii")}
        return {"master_address": HOST, "master_port": self._rendezvous.port}

    def join(self) -> None:
        """Form the group: every worker of every server must be in its init call."""
        device = self.devices[0]
        if self._rendezvous is None:
            self._communicator = self._new_communicator.from_unique_id_bytes(
                self._unique_id, rank=0, world_size=self._world_size, device=device
            )
            return
        group, closes = self._new_group(self._rendezvous)
        self._communicator = self._new_communicator(group, device=device)
        if closes:
            self._rendezvous.close(group.store)

    def _new_group(self, rendezvous: Rendezvous) -> tuple[Any, bool]:
        """The group, and whether its store listens at the socket that we must close."""
        from vllm.distributed.utils import StatelessProcessGroup

        arguments: dict[str, Any] = {
            "host": HOST,
            "port": rendezvous.port,
            "rank": 0,
            "world_size": self._world_size,
            "store_timeout": int(self._rendezvous_s),
        }
        ours = "listen_socket" in signature(StatelessProcessGroup.create).parameters
        if ours:
            arguments["listen_socket"] = rendezvous.socket
        else:  # 0.26 binds the port itself, and its store keeps listening
            rendezvous.socket.close()
        return StatelessProcessGroup.create(**arguments), ours

    def send(self, slot: int, size: int) -> None:
        import torch

        view = self.slots.view(self.devices[0], slot)[:size]
        with torch.cuda.stream(self._stream):
            self._communicator.broadcast(view, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None and hasattr(communicator, "destroy"):
            communicator.destroy()
        super().close()


def group_name(session: str) -> str:
    """The name of the group that the sender of a session forms."""
    return GROUP_PREFIX + session


class TorchNcclCarrier(DeviceCarrier):
    """Rank 0 of a group of torch.distributed, as SGLang's workers join it, on a GPU that no worker
    uses. The group lasts as long as the process; NCCL connects its ranks in the first broadcast.

    It is formed as SGLang's `init_custom_process_group` forms it (`srt/utils/common.py`, 0.5.14): a
    store under the group's name, then torch's own helper. So both sides must run the same torch,
    which they do: the sender runs in the servers' interpreter. Each chunk is a bucket, tensors
    without padding, and one broadcast within one update call.
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
