"""Everything that differs between vLLM versions in a weight push; chosen from `/version`.

Read in the released sources: `distributed/weight_transfer/{nccl_common,nccl_engine,ipc_engine}.py`
and the API router of 0.26, 0.27, 0.28, 0.29, 0.31 and 0.32. A worker builds a dataclass from each
payload, so a key that its version does not know is an error: payloads hold exactly the known keys.

| since | NCCL packed flag and buffers | IPC packed flag | weight version | checksums, shutdown |
|-------|------------------------------|-----------------|----------------|---------------------|
| 0.26  | every update_info            | every update    | –              | –                   |
| 0.27  | every update_info            | init_info       | yes            | –                   |
| 0.28  | init_info                    | init_info       | yes            | –                   |
| 0.32  | init_info                    | init_info       | yes            | yes                 |
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PackedBuffers:
    """Geometry of a packed NCCL broadcast; sender and workers must agree on it."""

    size_bytes: int
    count: int = 2

    def to_wire(self) -> dict[str, Any]:
        return {
            "packed": True,
            "packed_buffer_size_bytes": self.size_bytes,
            "packed_num_buffers": self.count,
        }


@dataclass(frozen=True)
class TensorHeaders:
    """What an update_info says of its tensors: parallel sequences, in wire order.

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

    def to_wire(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "dtype_names": list(self.dtypes),
            "shapes": [list(shape) for shape in self.shapes],
        }


@dataclass(frozen=True)
class Dialect:
    """One way of speaking the push. `note` is set when the version is not one we know.

    `keeps_streams`: the packed NCCL consumer uses the same CUDA streams in each update. Without it
    (vllm gh-52950), what torch cached for the last update's streams is never used again.
    """

    name: str
    nccl_buffers_in_init: bool
    ipc_packed_in_init: bool
    has_weight_version: bool
    has_checksum: bool
    has_shutdown: bool
    keeps_streams: bool
    note: str = ""

    def nccl_init_info(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        buffers: PackedBuffers | None,
    ) -> dict[str, Any]:
        """init_info of one server. Its workers take ranks from `rank_offset` up; the sender is 0.

        `world_size` counts the sender and the workers of every server. `buffers` None sends
        tensors one by one.
        """
        info: dict[str, Any] = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
        }
        if self.nccl_buffers_in_init:
            info |= buffers.to_wire() if buffers else {"packed": False}
        return info

    def nccl_update_info(
        self, tensors: TensorHeaders, *, buffers: PackedBuffers | None
    ) -> dict[str, Any]:
        """update_info of one broadcast of `tensors`, the same for every server."""
        info = tensors.to_wire()
        if not self.nccl_buffers_in_init:
            info |= buffers.to_wire() if buffers else {"packed": False}
        return info

    def ipc_init_info(self, *, packed: bool) -> dict[str, Any]:
        """init_info of the IPC backend: no rendezvous, at most the packed flag."""
        return {"packed": packed} if self.ipc_packed_in_init else {}

    def ipc_update_info(
        self,
        tensors: TensorHeaders,
        pickled_handles: str,
        *,
        sizes_bytes: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """update_info of one IPC chunk, with its handles as `pickle_handles` makes them.

        Packed (`sizes_bytes` given): the handles map each GPU's UUID to the rebuild arguments of
        one uint8 buffer, which `sizes_bytes` cuts into `tensors`. Unpacked: they are a list with
        one such mapping per tensor.

        Raises:
            ValueError: there are not as many sizes as tensors.
        """
        if sizes_bytes is not None and len(sizes_bytes) != len(tensors.names):
            raise ValueError(f"{len(sizes_bytes)} sizes for {len(tensors.names)} tensors")
        info = tensors.to_wire()
        info["ipc_handles_pickled"] = pickled_handles
        if sizes_bytes is not None:
            info["tensor_sizes"] = list(sizes_bytes)
        if not self.ipc_packed_in_init:
            info["packed"] = sizes_bytes is not None
        return info

    def finish_version(self, weight_version: str | None) -> str | None:
        """What /finish_weight_update is told: None where versions are not known to the server."""
        return weight_version if self.has_weight_version else None


_DIALECTS: tuple[tuple[tuple[int, int], Dialect], ...] = (
    ((0, 26), Dialect("0.26", False, False, False, False, False, False)),
    ((0, 27), Dialect("0.27", False, True, True, False, False, False)),
    ((0, 28), Dialect("0.28", True, True, True, False, False, False)),
    ((0, 32), Dialect("0.32", True, True, True, True, True, True)),
)
_NEWEST_READ = (0, 32)


def dialect_for(version: str) -> Dialect:
    """The dialect of a server that reports `version` (`0.32.0`, `0.33.0rc1.dev7+g1a2b3c` …).

    A version newer than the newest we have read, or one that is no release number, gets the newest
    dialect with a `note`; one older than 0.26 gets the oldest with a `note`.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else None
    newest = _DIALECTS[-1][1]
    if number is None or number == (0, 1):  # source builds without tags call themselves 0.1.dev…
        return replace(newest, note=f"vLLM {version!r} is no release: spoken to as {newest.name}")
    known = [dialect for since, dialect in _DIALECTS if since <= number]
    if not known:
        oldest = _DIALECTS[0][1]
        return replace(oldest, note=f"vLLM {version} is older than 0.26 and may refuse a push")
    if number > _NEWEST_READ:
        return replace(known[-1], note=f"vLLM {version} is newer than 0.32: spoken to as 0.32")
    return known[-1]


def rank_offsets(world_sizes: Sequence[int]) -> tuple[list[int], int]:
    """Rank offset of each server and the size of the whole group, for an NCCL push.

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


def pickle_handles(handles: Any) -> str:
    """IPC handles as vLLM takes them over HTTP: pickle, then base64 text."""
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")
