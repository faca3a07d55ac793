"""SGLang 0.5.14 to 0.5.23, with vllm-router, as an `Engine`: its command line, settings skyctl
keeps, and how it is told of tensors that it receives, or that are in another process's GPU memory.

`POST /update_weights_from_distributed` receives a bucket by one broadcast in a group that its
workers joined before (`load_format: flattened_bucket`): tensors one after the other, without gaps.

`POST /update_weights_from_tensor` takes one pickle for each tensor-parallel rank, here that of a
flattened bucket (`load_format: flattened_bucket`): a uint8 tensor, rebuilt from a CUDA IPC handle,
and the places of tensors in it. The pickle is assembled from parts, so that neither torch nor
SGLang is imported. Read in SGLang 0.5.14 to 0.5.23 (`weight_sync/tensor_bucket.py`, `SafeUnpickler`
and `MultiprocessingSerializer` in `utils/common.py`).
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.engines.base import (
    ArgumentRules,
    Engine,
    Feature,
    HubArguments,
    Variables,
    WeightTransfer,
)
from skyctl.engines.dialect import (
    HANDLE_PROTOCOL,
    Dialect,
    GroupJoin,
    PackedBuffers,
    Placement,
    TensorHeaders,
)
from skyctl.engines.guarding import guard_environment
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.launches import (
    RESERVED_ARGS,
    AdapterLimits,
    Command,
    Device,
    Reserved,
    ServerLaunch,
    Sizes,
    number_after,
    push_warnings,
)
from skyctl.engines.sglang.adapters import TARGETS, config_problem
from skyctl.engines.vllm.command import RESERVED as VLLM_RESERVED
from skyctl.engines.vllm.command import router_flags
from skyctl.engines.vllm.router import VLLM_ROUTER
from skyctl.errors import UsageError
from skyctl.store.credentials import CONTROL_TOKEN

if TYPE_CHECKING:
    from skyctl.engines.base import Server
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget

OLDEST, NEWEST = (0, 5, 14), (0, 5, 23)
"""The releases that were read. 0.5.16 seals a server's arguments; 0.5.17 returns token ids; 0.5.21
has sessions of updates, checksums for each model of a rank, and flushes while requests wait.
"""
_BUCKET = {
    "load_format": "flattened_bucket",
    "flush_cache": False,  # a flush while requests are held would end the server
}
_BEGIN, _END = pickle.PROTO + bytes([HANDLE_PROTOCOL]), pickle.STOP

_KEY_VARIABLE = "SKYCTL_API_KEY"
_SERVE = "skyctl.engines.sglang.inside.serve"
_SERVE_FILE = Path(__file__).with_name("inside") / "serve.py"
_HEALTH_VARIABLE = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
_MEMORY_SHARE = 0.88  # SGLang's own choice is about that, by the GPU's size
_CPU_SERVER_BYTES = 2 * 1024**3  # without weights and KV cache

_RESERVED = Reserved(
    server_args={
        **RESERVED_ARGS,
        "model-path": "use the key `model`",
        "tp-size": "use the key `tensor_parallel_size`",
        "pp-size": "use the key `pipeline_parallel_size`",
        "dp-size": "use the key `data_parallel_size`",
        "data-parallel-size": "use the key `data_parallel_size`",
        "weight-version": "skyctl labels weights when they are pushed",
        "enable-lora": "use the key `lora`",
        "max-lora-rank": "use the key `lora.max_rank`",
        "max-loras-per-batch": "use the key `lora.max_adapters`",
        "max-loaded-loras": "skyctl decides which adapters stay; see the key `lora.max_adapters`",
        "admin-api-key": "skyctl makes the control token; see the key `auth`",
        "tokenizer-worker-num": "skyctl's guard and SGLang's pause need one front end",
        "grpc-mode": "skyctl talks HTTP to its servers",
        "enable-http2": "skyctl talks plain HTTP to its servers",
        "fastapi-root-path": "skyctl asks its servers at the root",
        "hicache-storage-backend": "KV stored there would outlive the weights that it is of",
        "nnodes": "skyctl starts servers of one machine",
    },
    router_args=VLLM_RESERVED.router_args,
    env={
        "CUDA_VISIBLE_DEVICES": "use the key `gpus`",
        _KEY_VARIABLE: "use the key `api_key_env`",
        CONTROL_TOKEN: "skyctl makes it; see the key `auth`",
        _HEALTH_VARIABLE: "skyctl sets it: a paused server would count as dead",
    },
)


def _server_command(launch: ServerLaunch) -> Command:
    """SGLang's server behind skyctl's guard (`inside/serve.py`). Raises UsageError: the fleet file
    asks for something that skyctl does not support with SGLang.
    """
    if launch.adapters is not None and launch.parallelism.world_size > launch.parallelism.tensor:
        raise UsageError(
            "lora: SGLang loads adapters into servers of one pipeline stage and one data-parallel "
            "copy only",
            hint="use `replicas` or `tensor_parallel_size`, or take `lora` out",
        )
    if launch.backend and launch.parallelism.data > 1:
        raise UsageError(
            f"weight_transfer.transport {launch.backend!r}: SGLang's data-parallel servers take no "
            "tensors",
            hint="use disk, or `replicas` in place of `data_parallel_size`",
        )
    if launch.backend and "quantization" in launch.args:
        raise UsageError(
            f"weight_transfer.transport {launch.backend!r}: SGLang takes no tensors for quantized "
            "parameters",
            hint="use disk, or take `quantization` out",
        )
    if launch.backend and launch.parallelism.pipeline > 1:
        raise UsageError(
            f"weight_transfer.transport {launch.backend!r}: SGLang takes tensors by the rank "
            "within a stage, so that pipeline stages cannot be told apart",
            hint="use disk, or take `pipeline_parallel_size` out",
        )
    if launch.access.auth == "none" and launch.access.api_key is not None:
        raise UsageError(
            "auth: none with api_key_env: nothing would ask for the key, which skyctl's guard does",
            hint="take `auth: none` out, or `api_key_env`",
        )
    start = ("-m", _SERVE) if launch.own_python else (str(_SERVE_FILE),)
    argv = [launch.python, *start, "--model", launch.model.path]
    argv += ["--served-model-name", launch.model.name]
    argv += ["--host", launch.host, "--port", str(launch.port)]
    if launch.parallelism.tensor > 1:
        argv += ["--tp-size", str(launch.parallelism.tensor)]
    if launch.parallelism.pipeline > 1:
        argv += ["--pp-size", str(launch.parallelism.pipeline)]
    if launch.parallelism.data > 1:
        argv += ["--dp-size", str(launch.parallelism.data)]
    added = {**_defaults(launch.placement.device), **_adapter_arguments(launch.adapters)}
    argv += router_flags({**added, **launch.args})  # no `--no-x` here either
    return Command(tuple(argv), _environment(launch))


def _defaults(device: Device) -> dict[str, Any]:
    """What skyctl adds unless the file says otherwise."""
    if device == "cpu":
        return {"enable-metrics": True, "device": "cpu"}
    return {
        "enable-metrics": True,
        "enable-memory-saver": True,
        "enable-weights-cpu-backup": True,  # otherwise a server that slept would answer from zeros
    }


def _adapter_arguments(limits: AdapterLimits | None) -> dict[str, Any]:
    """What lets a server take adapters while it runs. The base model has a place like an adapter's
    in a batch.
    """
    if limits is None:
        return {}
    return {
        "enable-lora": True,
        "max-lora-rank": limits.rank,
        "max-loras-per-batch": limits.count + 1,
        "lora-target-modules": list(TARGETS),
    }


def _environment(launch: ServerLaunch) -> dict[str, str]:
    defaults = {"HF_HUB_OFFLINE": "1"} if launch.model.local else {}
    env = {name: value for name, value in defaults.items() if name not in launch.environ}
    env.update(launch.env)
    env[_HEALTH_VARIABLE] = "false"
    if launch.placement.device == "cuda":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that indices match nvidia-smi's
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in launch.placement.gpus)
    return env | guard_environment(launch, env, _KEY_VARIABLE)


def _backend(transport: str, device: Device, free_gpus: Sequence[int], auth: str) -> str:
    """Servers read checkpoints by themselves; on GPUs they can take them from a sender instead,
    which must be asked for. Raises UsageError: another transport was, or one for GPUs on CPU.
    """
    if transport in ("auto", "disk"):
        return ""
    if transport in ("ipc", "nccl") and device == "cuda":
        return transport
    raise UsageError(
        f"weight_transfer.transport {transport!r}: skyctl pushes to SGLang servers by disk, and on "
        "GPUs by ipc or nccl",
        hint="use auto or disk",
    )


def _modules(device: Device, router: bool, backend: str, pairs: bool) -> dict[str, str]:
    """Modules that the servers' interpreter must have, and how to get each."""
    install = "pip install 'skyctl-fleet[sglang]', or name an interpreter with `python:`"
    modules = {"sglang": install}
    if backend:
        modules["skyctl"] = "install skyctl there too, for the sender; or use transport disk"
    if router:
        modules["vllm_router"] = "pip install vllm-router, or set `router: {enabled: false}`"
    return modules


def _warnings(launches: Sequence[ServerLaunch], share_gpus: bool) -> Iterator[tuple[str, str]]:
    """Arguments that do not do what they say, and what to write instead."""
    bounded = all("mem-fraction-static" in launch.args for launch in launches)
    if launches[0].placement.device == "cuda" and share_gpus and not bounded:
        yield (
            "share_gpus: set `mem-fraction-static` under args; by default each server takes nearly "
            "nine tenths of its GPU's memory",
            "args: {mem-fraction-static: 0.4}, or less",
        )
    from skyctl.engines.sglang.server import settings_problem

    settings = [{**_adapter_arguments(launch.adapters), **launch.args} for launch in launches]
    yield from push_warnings(map(settings_problem, settings))
    # a model that is not on this machine is downloaded by the servers
    configs = [launch.model.config or {} for launch in launches]
    yield from push_warnings(map(config_problem, settings, configs))


def _sizes(argv: Sequence[str], env: Mapping[str, str]) -> Sizes:
    """By what the command says, else by SGLang's defaults."""
    share = number_after("--mem-fraction-static", argv, _MEMORY_SHARE)
    return Sizes(_CPU_SERVER_BYTES, share, int(number_after("--dp-size", argv, 1)))


@dataclass(frozen=True)
class SGLangDialect(Dialect):
    keeps_streams: bool = True
    places_tensors: bool = True
    takes_buckets: bool = True

    def refuses(self, config: Mapping[str, Any]) -> str:
        """Quantized parameters are changed once they are loaded, and take no more tensors."""
        if "quantization_config" in config:
            return "SGLang takes no tensors of a quantized checkpoint"
        return ""

    def ipc_update_info(
        self, tensors: TensorHeaders, handles: Any, placement: Placement
    ) -> dict[str, Any]:
        return {
            "serialized_named_tensors": [bucket(handle, tensors, placement) for handle in handles],
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


def dialect_for(version: str) -> SGLangDialect:
    """The dialect of a server that reports `version`."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match and OLDEST <= tuple(map(int, match.groups())) <= NEWEST:
        return SGLangDialect()
    newest = ".".join(map(str, NEWEST))
    return SGLangDialect(
        note=f"SGLang {version or '?'} is unknown to skyctl: it is treated as {newest}"
    )


def bucket(handle: str, tensors: TensorHeaders, placement: Placement) -> str:
    """One rank's pickle, as base64 text: the places of `tensors` in a uint8 buffer, whose `handle`
    is base64 of the pickled arguments of torch's `rebuild_cuda_tensor`.
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


def _server(client: ControlClient, target: ServerTarget, timeout_s: float) -> Server:
    from skyctl.engines.sglang.server import SGLangServer

    return SGLangServer(client, target, timeout_s)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    supports=frozenset({Feature.SLEEP, Feature.PUSH, Feature.ADAPTERS}),
    server=_server,
    server_command=_server_command,
    modules=_modules,
    variables=Variables(_KEY_VARIABLE, HELD_VARIABLE),
    reserved=_RESERVED,
    arguments=ArgumentRules(warnings=_warnings, sleep="enable-memory-saver"),
    hub=HubArguments(
        revisions={
            "model": "revision",
            "speculative-draft-model-path": "speculative-draft-model-revision",
        },
        shared_revision=frozenset({"tokenizer-path"}),
    ),
    transfer=WeightTransfer(_backend, dialect_for),
    sizes=_sizes,
    routing=VLLM_ROUTER,
)
