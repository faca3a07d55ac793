"""vLLM 0.26 and newer, with vllm-router, as an `Engine`: everything that differs between its
versions in a weight push.

Every command loads this module with the fleet file; most of them call no server themselves.

A server's dialect is chosen from its `/version`. Read in the released sources:
`distributed/weight_transfer/{nccl_common,nccl_engine,ipc_engine}.py` and the API router of 0.26,
0.27, 0.28, 0.29, 0.31, 0.32 and 0.33. A worker builds a dataclass from each payload, so a key that
its version does not know is an error: payloads hold exactly the known keys.

| since | NCCL packed flag and buffers | IPC packed flag | weight version | checksums, shutdown |
|-------|------------------------------|-----------------|----------------|---------------------|
| 0.26  | every update_info            | every update    | –              | –                   |
| 0.27  | every update_info            | init_info       | yes            | –                   |
| 0.28  | init_info                    | init_info       | yes            | –                   |
| 0.32  | init_info                    | init_info       | yes            | yes                 |
| 0.33  | init_info                    | init_info       | yes            | yes                 |

From 0.32 on a group over NCCL can also meet by NCCL's unique id. From 0.33 on a server that is
paused by abort or wait answers arrivals 503, unless skyctl's gate has it queue them
(`inside/gate.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from skyctl.engines.base import (
    ArgumentRules,
    Engine,
    Feature,
    HubArguments,
    Variables,
    WeightTransfer,
)
from skyctl.engines.dialect import Dialect, GroupJoin, PackedBuffers, Placement, TensorHeaders
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.vllm import command
from skyctl.engines.vllm.arguments import argument_problem, known_arguments
from skyctl.engines.vllm.router import VLLM_ROUTER
from skyctl.engines.vllm.traffic import traffic

if TYPE_CHECKING:
    from skyctl.engines.base import Server
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget


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
class VLLMDialect(Dialect):
    """`Dialect` of vLLM: of version `name`, until the next that differs. Without `keeps_streams`
    (vllm gh-52950), what torch cached for the last update's streams is never used again.

    `nccl_buffers_in_init`, `ipc_packed_in_init`: how tensors are packed is told in init_info, and
    not in each update_info.
    """

    name: str
    nccl_buffers_in_init: bool
    ipc_packed_in_init: bool

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

    def trainer_init_info(self, backend: str, join: GroupJoin) -> dict[str, Any] | None:
        if backend == "ipc":
            return self.ipc_init_info(packed=False)
        if backend not in ("nccl", "sparse_nccl"):
            return None
        return self.nccl_init_info(join, buffers=None)

    def ipc_update_info(
        self, tensors: TensorHeaders, handles: Any, placement: Placement
    ) -> dict[str, Any]:
        """Raises ValueError if the numbers of sizes and tensors differ."""
        if len(placement.sizes) != len(tensors.names):
            raise ValueError(f"{len(placement.sizes)} sizes for {len(tensors.names)} tensors")
        sizes = list(placement.sizes)
        info = {**_headers_to_wire(tensors), "ipc_handles_pickled": handles, "tensor_sizes": sizes}
        return info if self.ipc_packed_in_init else {**info, "packed": True}


_DIALECTS: tuple[tuple[tuple[int, int], VLLMDialect], ...] = (
    ((0, 26), VLLMDialect("0.26", False, False)),
    ((0, 27), VLLMDialect("0.27", False, True, labels_at_finish=True)),
    ((0, 28), VLLMDialect("0.28", True, True, labels_at_finish=True)),
    ((0, 32), VLLMDialect("0.32", True, True, keeps_streams=True, joins_by_id=True)),
    ((0, 33), VLLMDialect("0.33", True, True, keeps_streams=True, joins_by_id=True)),
)


def dialect_for(version: str) -> VLLMDialect:
    """The dialect of a server that reports `version` (`0.33.0`, `0.34.0rc1.dev7+g1a2b3c` …).

    A version newer than the newest known, or one that is not a release number, gets the newest
    dialect with a `note`; one older than 0.26 gets the oldest with a `note`.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else None
    newest_read, newest = _DIALECTS[-1]
    if number is None or number == (0, 1):  # source builds without tags call themselves 0.1.dev…
        return replace(
            newest, note=f"vLLM {version!r} is not a release: it is treated as {newest.name}"
        )
    dialects = [dialect for since, dialect in _DIALECTS if since <= number]
    if not dialects:
        oldest = _DIALECTS[0][1]
        return replace(oldest, note=f"vLLM {version} is older than 0.26 and may refuse a push")
    if number > newest_read:
        note = f"vLLM {version} is newer than {newest.name}: it is treated as {newest.name}"
        return replace(newest, note=note)
    return dialects[-1]


def _server(client: ControlClient, target: ServerTarget, timeout_s: float) -> Server:
    from skyctl.engines.vllm.server import VLLMServer

    return VLLMServer(client, target, timeout_s)


VLLM = Engine(
    name="vllm",
    title="vLLM",
    supports=frozenset(Feature),
    server=_server,
    server_command=command.server_command,
    modules=command.modules,
    variables=Variables(
        command.KEY_VARIABLE,
        HELD_VARIABLE,
        placement=(command.CORES_VARIABLE, command.SIDE_PORT_VARIABLE),
    ),
    reserved=command.RESERVED,
    arguments=ArgumentRules(
        known_arguments, argument_problem, command.warnings, sleep="enable-sleep-mode"
    ),
    hub=HubArguments(
        revisions={
            "model": "revision",
            "tokenizer": "tokenizer-revision",
            "spec-model": "speculative-config.revision",
            "speculative-config.model": "speculative-config.revision",
        },
        follows_model=frozenset({"tokenizer"}),
        shared_revision=frozenset({"hf-config-path"}),
        other_hub_variable="VLLM_USE_MODELSCOPE",
    ),
    transfer=WeightTransfer(command.backend, dialect_for),
    sizes=command.sizes,
    routing=VLLM_ROUTER,
    traffic=traffic,
)
