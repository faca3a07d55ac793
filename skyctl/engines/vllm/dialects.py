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

From 0.32 on a group over NCCL can also meet by NCCL's unique id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyctl.engines.base import GroupJoin, PackedBuffers, Placement, TensorHeaders


def _buffers_to_wire(buffers: PackedBuffers | None) -> dict[str, Any]:
    if buffers is None:
        return {"packed": False}
    return {
        "packed": True,
        "packed_buffer_size_bytes": buffers.size_bytes,
        "packed_num_buffers": buffers.count,
    }


def _headers_to_wire(tensors: TensorHeaders) -> dict[str, Any]:
    return {
        "names": list(tensors.names),
        "dtype_names": list(tensors.dtypes),
        "shapes": [list(shape) for shape in tensors.shapes],
    }


@dataclass(frozen=True)
class VLLMDialect:
    """One way of speaking the push. `note` is set for an unknown version.

    `labels_at_finish`: only the end of an update can label the weights. `keeps_streams`: the packed
    NCCL consumer uses the same CUDA streams in each update. Without it (vllm gh-52950), what torch
    cached for the last update's streams is never used again.
    """

    name: str
    nccl_buffers_in_init: bool
    ipc_packed_in_init: bool
    labels_at_finish: bool
    keeps_streams: bool
    note: str = ""
    places_tensors: bool = False
    joins_by_id: bool = False
    takes_buckets: bool = False

    def refuses(self, config: Mapping[str, Any]) -> str:
        return ""

    def nccl_init_info(self, join: GroupJoin, *, buffers: PackedBuffers | None) -> dict[str, Any]:
        info: dict[str, Any] = {"rank_offset": join.rank_offset, "world_size": join.world_size}
        if join.unique_id:
            info["nccl_unique_id_b64"] = join.unique_id
        else:
            info |= {"master_address": join.master_address, "master_port": join.master_port}
        if self.nccl_buffers_in_init:
            info |= _buffers_to_wire(buffers)
        return info

    def nccl_update_info(
        self, tensors: TensorHeaders, *, buffers: PackedBuffers | None, group: str = ""
    ) -> dict[str, Any]:
        info = _headers_to_wire(tensors)
        if not self.nccl_buffers_in_init:
            info |= _buffers_to_wire(buffers)
        return info

    def ipc_init_info(self, *, packed: bool) -> dict[str, Any]:
        return {"packed": packed} if self.ipc_packed_in_init else {}

    def trainer_init_info(self, backend: str, **rendezvous: Any) -> dict[str, Any] | None:
        if backend == "ipc":
            return self.ipc_init_info(packed=False)
        if backend not in ("nccl", "sparse_nccl"):
            return None
        return self.nccl_init_info(GroupJoin(**rendezvous), buffers=None)

    def ipc_update_info(
        self, tensors: TensorHeaders, handles: Any, placement: Placement | None = None
    ) -> dict[str, Any]:
        """Raises ValueError if the numbers of sizes and tensors differ."""
        if placement is not None and len(placement.sizes) != len(tensors.names):
            raise ValueError(f"{len(placement.sizes)} sizes for {len(tensors.names)} tensors")
        info = _headers_to_wire(tensors)
        info["ipc_handles_pickled"] = handles
        if placement is not None:
            info["tensor_sizes"] = list(placement.sizes)
        if not self.ipc_packed_in_init:
            info["packed"] = placement is not None
        return info


_DIALECTS: tuple[tuple[tuple[int, int], VLLMDialect], ...] = (
    ((0, 26), VLLMDialect("0.26", False, False, False, False)),
    ((0, 27), VLLMDialect("0.27", False, True, True, False)),
    ((0, 28), VLLMDialect("0.28", True, True, True, False)),
    ((0, 32), VLLMDialect("0.32", True, True, False, True, joins_by_id=True)),
)
_NEWEST_READ = (0, 32)


def dialect_for(version: str) -> VLLMDialect:
    """The dialect of a server that reports `version` (`0.32.0`, `0.33.0rc1.dev7+g1a2b3c` …).

    A version newer than the newest known, or one that is not a release number, gets the newest
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
