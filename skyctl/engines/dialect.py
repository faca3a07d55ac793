"""How one version of an engine speaks the push: the bodies of its update routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import (
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PackedBuffers:
    """Geometry of a packed NCCL broadcast; sender and workers must agree on it."""

    size_bytes: int
    count: int = 2


@dataclass(frozen=True)
class TensorHeaders:
    """An update's description of its tensors: parallel sequences, in wire order.

    `dtypes` are torch's names without prefix, such as `bfloat16`.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes, {len(self.shapes)} shapes"
            )


@dataclass(frozen=True)
class Placement:
    """The place of each tensor of a chunk in its buffer, in wire order, in bytes."""

    offsets: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class GroupJoin:
    """How one server's workers join a group over NCCL. They meet at the store of an address and
    port, or by NCCL's unique id.
    """

    rank_offset: int
    """The rank of the server's first worker; the sender is 0."""
    world_size: int
    """The number of members: the sender and the workers of every server."""
    master_address: str = ""
    """The address of the store."""
    master_port: int = 0
    """The port of the store."""
    unique_id: str = ""
    """NCCL's unique id, as base64 text."""
    name: str = ""
    """The group's name, where servers can be in several."""


GROUP_PREFIX = "skyctl-"
"""What the names of senders' groups begin with, so that servers leave no group of others."""


HANDLE_PROTOCOL = 3
"""Pickle protocol of IPC handles that are keyed by rank, so that they can be embedded in other
pickles: the latest without frames; earlier ones pickle bytes by a call that SGLang refuses.
"""


@dataclass(frozen=True, kw_only=True)
class Dialect(ABC):
    """How one version of an engine speaks the push."""

    note: str = ""
    """What to warn of: set for an unknown version."""
    labels_at_finish: bool = False
    """Only finish_weight_update can label the weights."""
    keeps_streams: bool = False
    """The packed NCCL consumer uses the same CUDA streams in each update."""
    places_tensors: bool = False
    """Updates by CUDA IPC say where each tensor is; otherwise tensors follow each other without
    gaps."""
    joins_by_id: bool = False
    """A group over NCCL may meet by NCCL's unique id, without a store."""
    takes_buckets: bool = False
    """Over NCCL, workers join a group of torch.distributed, and each update receives one broadcast.
    """

    def refuses(self, config: Mapping[str, Any]) -> str:
        """Why tensors of a checkpoint with this config.json cannot be sent; "" if they can."""
        return ""

    @abstractmethod
    def nccl_init_info(self, join: GroupJoin, *, buffers: PackedBuffers | None) -> dict[str, Any]:
        """init_info of one server. `buffers` None sends tensors one by one."""

    @abstractmethod
    def nccl_update_info(
        self, tensors: TensorHeaders, *, buffers: PackedBuffers | None, group: str = ""
    ) -> dict[str, Any]:
        """update_info of one broadcast of `tensors` in `group`, the same for every server."""

    def ipc_init_info(self, *, packed: bool) -> dict[str, Any]:
        """init_info of CUDA IPC: no rendezvous."""
        return {}

    def trainer_init_info(self, backend: str, join: GroupJoin) -> dict[str, Any] | None:
        """init_info of one server for a trainer that sends tensors one by one, with its own engine;
        None for a backend that only that engine can open.
        """
        return None

    @abstractmethod
    def ipc_update_info(
        self, tensors: TensorHeaders, handles: Any, placement: Placement
    ) -> dict[str, Any]:
        """update_info of one IPC chunk: one uint8 buffer, with `tensors` at the places given by
        `placement`. `handles` are as the carrier made them (`transfer/transports/ipc.py`).
        """
