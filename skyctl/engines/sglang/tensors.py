"""How SGLang is told of tensors that it receives, and of those in another process's GPU memory.

`POST /update_weights_from_distributed` receives a bucket by one broadcast in a group that its
workers joined before (`load_format: flattened_bucket`): tensors one after the other, without gaps.

`POST /update_weights_from_tensor` takes one pickle for each tensor-parallel rank, here that of a
flattened bucket (`load_format: flattened_bucket`): a uint8 tensor, rebuilt from a CUDA IPC handle,
and the places of tensors in it. The pickle is assembled from parts, so that neither torch nor
SGLang is imported. Read in SGLang 0.5.14 (`weight_sync/tensor_bucket.py`, `SafeUnpickler` and
`MultiprocessingSerializer` in `utils/common.py`).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl.engines.base import HANDLE_PROTOCOL, GroupJoin, PackedBuffers, Placement, TensorHeaders

KNOWN = "0.5.14"
_BUCKET = {
    "load_format": "flattened_bucket",
    "flush_cache": False,  # a flush while requests are held would end the server
}
_BEGIN, _END = pickle.PROTO + bytes([HANDLE_PROTOCOL]), pickle.STOP


@dataclass(frozen=True)
class SGLangDialect:
    """`Dialect` (`engines/base.py`). `note` is set for an unknown version."""

    note: str = ""
    labels_at_finish: bool = False
    keeps_streams: bool = True
    places_tensors: bool = True
    joins_by_id: bool = False
    takes_buckets: bool = True

    def refuses(self, config: Mapping[str, Any]) -> str:
        """Quantized parameters are changed once they are loaded, and take no more tensors."""
        if "quantization_config" in config:
            return "SGLang takes no tensors of a quantized checkpoint"
        return ""

    def ipc_init_info(self, *, packed: bool) -> dict[str, Any]:
        return {}

    def ipc_update_info(
        self, tensors: TensorHeaders, handles: Any, placement: Placement | None = None
    ) -> dict[str, Any]:
        assert placement is not None  # it takes no tensors without one
        return {
            "serialized_named_tensors": [bucket(one, tensors, placement) for one in handles],
            **_BUCKET,
        }

    def nccl_init_info(self, join: GroupJoin, *, buffers: PackedBuffers | None) -> dict[str, Any]:
        return {
            "master_address": join.master_address,
            "master_port": join.master_port,
            "rank_offset": join.rank_offset,
            "world_size": join.world_size,
            "group_name": join.name,
            "backend": "nccl",
        }

    def nccl_update_info(
        self, tensors: TensorHeaders, *, buffers: PackedBuffers | None, group: str = ""
    ) -> dict[str, Any]:
        return {
            "names": list(tensors.names),
            "dtypes": list(tensors.dtypes),
            "shapes": [list(shape) for shape in tensors.shapes],
            "group_name": group,
            **_BUCKET,
        }

    def trainer_init_info(self, backend: str, **_: Any) -> dict[str, Any] | None:
        return None


def dialect_for(version: str) -> SGLangDialect:
    """The dialect of a server that reports `version`."""
    if version == KNOWN:
        return SGLangDialect()
    return SGLangDialect(f"SGLang {version or '?'} was not read: spoken to as {KNOWN}")


def bucket(handle: str, tensors: TensorHeaders, placement: Placement) -> str:
    """One rank's pickle, as base64 text.

    Args:
        handle: base64 of the pickled arguments of torch's `rebuild_cuda_tensor` for a uint8 buffer.
        placement: the places of `tensors` in it.
    """
    arguments = _inside(base64.b64decode(handle))
    buffer = _global("torch.multiprocessing.reductions", "rebuild_cuda_tensor") + arguments
    entries = b"".join(
        _entry(name, dtype, shape, begin, size)
        for name, dtype, shape, begin, size in zip(
            tensors.names,
            tensors.dtypes,
            tensors.shapes,
            placement.offsets,
            placement.sizes,
            strict=True,
        )
    )
    parts = [
        *(_BEGIN, pickle.EMPTY_DICT, pickle.MARK),
        *(_plain("flattened_tensor"), buffer, pickle.REDUCE),
        *(_plain("metadata"), pickle.EMPTY_LIST, pickle.MARK, entries, pickle.APPENDS),
        *(pickle.SETITEMS, _END),
    ]
    return base64.b64encode(b"".join(parts)).decode("ascii")


def _entry(name: str, dtype: str, shape: Sequence[int], begin: int, size: int) -> bytes:
    """A `FlattenedTensorMetadata`: name, shape, dtype, begin, end and size in bytes."""
    made = _global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
    values = _plain(name) + _plain(tuple(shape)) + _global("torch", dtype)
    values += b"".join(map(_plain, (begin, begin + size, size)))
    return made + pickle.MARK + values + pickle.TUPLE + pickle.REDUCE


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _plain(value: object) -> bytes:
    return _inside(pickle.dumps(value, HANDLE_PROTOCOL))


def _inside(pickled: bytes) -> bytes:
    """The part that puts the pickled value on the stack. Raises ValueError for another protocol."""
    if not (pickled.startswith(_BEGIN) and pickled.endswith(_END)):
        raise ValueError("not a pickle of protocol 3")
    return pickled[len(_BEGIN) : -len(_END)]
