"""The command line of vLLM, and what a fleet file must leave to skyctl. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from skyctl.engines.guarding import guard_environment
from skyctl.engines.inside.guard import VLLM
from skyctl.engines.launches import (
    RESERVED_ARGS,
    AdapterLimits,
    Command,
    Device,
    HandOver,
    Reserved,
    ServerLaunch,
    Sizes,
    Span,
    number_after,
    push_warnings,
    update_problem,
)
from skyctl.engines.vllm.inside.adapters import SWITCH as ADAPTER_SWITCH
from skyctl.errors import UsageError
from skyctl.store.credentials import CONTROL_TOKEN
from skyctl.units import finite_or
from skyctl.wire.messages import BACKEND, SPIN_VARIABLE

KEY_VARIABLE = VLLM.key_variable
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
SIDE_HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
SIDE_PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
WORKER_EXTENSION = "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension"
_INSIDE = "skyctl.engines.inside"
VERSIONS, VERSIONS_ALONE = f"{_INSIDE}.versions.Versioned", "skyctl_inside.versions.Versioned"
GATE, GATE_ALONE = f"{_INSIDE}.gate.Gate", "skyctl_inside.gate.Gate"
GUARD, GUARD_ALONE = f"{_INSIDE}.guard.Guard", "skyctl_inside.guard.Guard"
CONNECTOR = "skyctl.engines.vllm.inside.pairs"

_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_KV_ARGUMENT = "kv-cache-memory-bytes"
_SERVER_MODULE = "skyctl.engines.vllm.inside.serve"
_SERVER_MODULE_ALONE = "vllm.entrypoints.openai.api_server"  # for an interpreter without skyctl
_HEADLESS_MODULE = "skyctl.engines.vllm.inside.headless"
_GIB = 1024**3
_CPU_SERVER_BYTES = int(1.3 * _GIB)  # without weights and KV cache
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
_GPU_SHARE = 0.9  # vLLM's default gpu-memory-utilization
_WEIGHTLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})  # from the tokens themselves

_GPU_BACKENDS = frozenset({"nccl", "ipc", "sparse_nccl", "nccl_m2n"})

# What skyctl sets itself, and what to write instead. Overriding these would make a server that
# skyctl cannot reach, push to or account for.
RESERVED = Reserved(
    server_args={
        **RESERVED_ARGS,
        "uds": "skyctl reaches servers over TCP; use `host` and `ports`",
        "model-tag": "use the key `model`",
        "tp": "use the key `tensor_parallel_size`",
        "pp": "use the key `pipeline_parallel_size`",
        "data-parallel-size": "use the key `data_parallel_size`",
        "dp": "use the key `data_parallel_size`",
        "nnodes": "use the key `nodes_per_replica`",
        "node-rank": "use the key `nodes_per_replica`",
        "master-addr": "use the key `nodes_per_replica`",
        "master-port": "use the key `nodes_per_replica`",
        "weight-transfer-config": "use the key `weight_transfer`",
        "enable-lora": "use the key `lora`",
        "max-loras": "use the key `lora.max_adapters`",
        "max-cpu-loras": "use the key `lora.max_adapters`",
        "max-lora-rank": "use the key `lora.max_rank`",
        "lora-modules": "use the key `lora.adapters`",
        "hf-token": "set HF_TOKEN in the environment; tokens never go on a command line",
    },
    router_args={
        "host": "use the key `router.host`",
        "port": "use the key `router.port`",
        "prometheus-port": "use the key `router.metrics_port`",
        "policy": "use the key `router.policy`",
        "health-check-interval-secs": "use the key `router.health_interval_s`",
        "request-timeout-secs": "use the key `router.request_timeout_s`",
        "worker-urls": "skyctl adds each server when it is ready",
        "vllm-pd-disaggregation": "give groups under `replicas` a `role`",
        "prefill": "give groups under `replicas` a `role`",
        "decode": "give groups under `replicas` a `role`",
        "api-key": "use the key `api_key_env`; keys never go on a command line",
    },
    env={
        "CUDA_VISIBLE_DEVICES": "use the key `gpus`",
        KEY_VARIABLE: "use the key `api_key_env`",
        CONTROL_TOKEN: "skyctl makes it; see the key `auth`",
        "VLLM_SERVER_DEV_MODE": "skyctl needs it on: every control call is a development route",
        ADAPTER_SWITCH: "use the key `lora`",
        SIDE_HOST_VARIABLE: "skyctl sets it for servers with a `role`",
        SIDE_PORT_VARIABLE: "skyctl takes a free port for servers with a `role`",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "skyctl sets it when the transport needs it (ipc)",
    },
)

# The router's argparse takes one value per occurrence of these (action="append").
_ONE_VALUE_PER_FLAG = frozenset(
    {
        "kv-event-source",
        "kv-event-replay-source",
        "pd-kv-events",
        "prefill",
        "decode",
        "wasm-middleware-route",
    }
)


def _middleware(launch: ServerLaunch) -> list[str]:
    """What stands before vLLM; the last sees a request first."""
    own = launch.own_python
    chosen = [VERSIONS if own else VERSIONS_ALONE, GATE if own else GATE_ALONE]
    if str(launch.args.get("api-server-count", 1)) != "1":
        chosen = []  # a pause or a label reaches only one of several processes
    if launch.access.auth != "none":
        chosen.append(GUARD if own else GUARD_ALONE)
    return chosen


def server_command(launch: ServerLaunch) -> Command:
    """The API server, or a part of it that leads no other, and what is added to its environment."""
    span = launch.placement.span
    answers = span is None or span.rank == 0
    module = _HEADLESS_MODULE
    if answers:
        module = _SERVER_MODULE if launch.own_python else _SERVER_MODULE_ALONE
    argv = [launch.python, "-m", module, "--model", launch.model.path]
    argv += ["--served-model-name", launch.model.name]
    if answers:
        argv += ["--host", launch.host, "--port", str(launch.port)]
    for kind, size in asdict(launch.parallelism).items():
        if size > 1:
            argv += [f"--{kind}-parallel-size", str(size)]
    if span is not None:
        argv += server_flags(_span_arguments(launch, span))
    if launch.backend:
        transfer = json.dumps({"backend": launch.backend}, separators=(",", ":"))
        argv += ["--weight-transfer-config", transfer]
    arguments = {**_default_arguments(launch), **launch.args}
    if launch.placement.device == "cpu" and arguments.get("enable-sleep-mode"):
        del arguments["enable-sleep-mode"]  # vLLM refuses to start with it on CPU
    argv += server_flags(arguments)
    if launch.adapters is not None:
        argv += server_flags(_adapter_arguments(launch.adapters))
    if launch.hand_over is not None:
        argv += server_flags(_hand_over_arguments(launch, launch.hand_over))
    if answers:
        argv += [word for path in _middleware(launch) for word in ("--middleware", path)]
    return Command(tuple(argv), _environment(launch))


def _default_arguments(launch: ServerLaunch) -> dict[str, Any]:
    """What skyctl adds unless the file says otherwise."""
    if launch.placement.device == "cuda":
        # the digest that verifies a push takes milliseconds there; vLLM's own checksums copy
        # the model out and take 22 s for 16 GB. Another interpreter may not have skyctl.
        own = {"worker-extension-cls": WORKER_EXTENSION} if launch.own_python else {}
        return {"enable-sleep-mode": True, **own}
    # float32: vLLM's bfloat16 CPU kernels can die with SIGILL on virtual machines that
    # advertise AMX but do not let it be used; and CPU pushes are compared bit for bit.
    return {"dtype": "float32", "worker-extension-cls": WORKER_EXTENSION}


def _adapter_arguments(limits: AdapterLimits) -> dict[str, Any]:
    """What lets a server take adapters while it runs. After a change, requests of a version and of
    the one before it are under way together: twice as many are kept in host memory."""
    return {
        "enable-lora": True,
        "max-loras": limits.count,
        "max-cpu-loras": 2 * limits.count,
        "max-lora-rank": next((rank for rank in _RANKS if rank >= limits.rank), limits.rank),
    }


def _hand_over_arguments(launch: ServerLaunch, hand_over: HandOver) -> dict[str, Any]:
    """vLLM's NixlConnector. A decode server that cannot fetch a cache computes it itself."""
    if "kv-transfer-config" in launch.args:
        raise UsageError(
            "argument 'kv-transfer-config' is set by skyctl for servers with a `role`",
            hint="leave one of the two out; the key `kv_lease_s` is for how long caches are kept",
        )
    # another interpreter may not have skyctl
    own = {"kv_connector_module_path": CONNECTOR} if launch.own_python else {}
    return {
        "kv-transfer-config": {
            "kv_connector": "NixlConnector",
            **own,
            "kv_role": "kv_producer" if hand_over.role == "prefill" else "kv_consumer",
            "kv_buffer_device": launch.placement.device,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": hand_over.lease_s},
        }
    }


def _span_arguments(launch: ServerLaunch, span: Span) -> dict[str, Any]:
    """vLLM's own way over several machines; only its mp executor knows it."""
    if launch.args.get("distributed-executor-backend", "mp") != "mp":
        raise UsageError(
            "argument 'distributed-executor-backend' does not go with `nodes_per_replica`: the "
            "parts on several machines are vLLM's mp executors",
            hint="leave one of the two out",
        )
    return {
        "nnodes": span.nodes,
        "node-rank": span.rank,
        "master-addr": span.address,
        "master-port": span.port,
    }


def _environment(launch: ServerLaunch) -> dict[str, str]:
    placement, span = launch.placement, launch.placement.span
    defaults: dict[str, str] = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if launch.model.local:
        defaults["HF_HUB_OFFLINE"] = "1"  # a local checkpoint needs nothing from the hub
    if placement.device == "cpu":
        if _KV_ARGUMENT not in launch.args:  # over which vLLM puts the variable
            defaults[_KV_VARIABLE] = "1"  # GiB; vLLM takes 4 for each replica
        defaults[SPIN_VARIABLE] = "0.02"
        if placement.cores:  # workers of one server by `|`, in rank order
            workers = (",".join(map(str, cores)) for cores in placement.cores)
            defaults[CORES_VARIABLE] = "|".join(workers)
    env = {name: value for name, value in defaults.items() if name not in launch.environ}
    env.update(launch.env)
    env["VLLM_SERVER_DEV_MODE"] = "1"
    if launch.adapters is not None:
        env[ADAPTER_SWITCH] = "1"
    if placement.device == "cuda":
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that indices mean what nvidia-smi shows
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in placement.gpus)
    if launch.hand_over is not None:
        env[SIDE_HOST_VARIABLE] = "127.0.0.1"
        env[SIDE_PORT_VARIABLE] = str(launch.hand_over.port)
    if span is not None:
        env["VLLM_HOST_IP"] = span.own_address
        if span.interface:  # else by the host's name, which often is loopback's
            env.setdefault("GLOO_SOCKET_IFNAME", span.interface)
        if span.rank:  # its workers do not end when they are asked to: 5 s by default
            env["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "1"
            return env
    if launch.backend == "ipc":
        # CUDA IPC handles travel pickled in the body of /update_weights
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return env | guard_environment(launch, env, KEY_VARIABLE)


def backend(transport: str, device: Device, free_gpus: Sequence[int], auth: str) -> str:
    """On CPU one backend serves both gloo and shm. On CUDA, NCCL needs a GPU for the sender that no
    worker uses; CUDA IPC does not, but its servers unpickle what they are sent: only with a token.
    Raises UsageError: the transport does not go with the device.
    """
    if transport == "disk":
        return ""
    if device == "cpu":
        if transport in ("nccl", "ipc"):
            raise UsageError(
                f"weight_transfer.transport {transport!r} needs GPUs, and this fleet runs on CPU",
                hint="use auto, gloo, shm or disk",
            )
        return BACKEND
    if transport in ("gloo", "shm"):
        raise UsageError(
            f"weight_transfer.transport {transport!r} is for CPU servers, and this fleet runs on "
            "GPUs",
            hint="use auto, nccl, ipc or disk",
        )
    if transport == "auto":
        return "nccl" if free_gpus else "ipc" if auth != "none" else ""
    return transport


def modules(device: Device, router: bool, backend: str, pairs: bool) -> dict[str, str]:
    """Modules that the servers' interpreter must have, and how to get each."""
    cpu = device == "cpu"
    install = "bash scripts/setup.sh" if cpu else "pip install '.[gpu]'"
    needed = {"vllm": f"in skyctl's clone: {install}; or name an interpreter with `python:`"}
    if router:
        needed["vllm_router"] = "pip install vllm-router, or set `router: {enabled: false}`"
    if pairs:
        wheels = "--no-deps nixl==1.5.1 nixl-cu12==1.5.1" if cpu else "nixl"
        needed["nixl"] = f"pip install {wheels}"
    if backend == BACKEND:
        needed["skyctl"] = "install skyctl there too: its weight receiver runs inside vLLM"
    return needed


def warnings(launches: Sequence[ServerLaunch], share_gpus: bool) -> Iterator[tuple[str, str]]:
    """Arguments that do not do what they say, and what to write instead."""
    on_cpu = launches[0].placement.device == "cpu"
    if on_cpu and any(launch.args.get("enable-sleep-mode") for launch in launches):
        yield (
            "enable-sleep-mode is left out: vLLM has none on CPU",
            "take it out of `args`, or keep it for machines with GPUs",
        )
    if on_cpu and (backend := launches[0].backend) in _GPU_BACKENDS:
        yield (
            f"weight_transfer.backend {backend} needs GPUs: on CPU a trainer's first update fails",
            "leave `backend` out, and push with `skyctl sync-weights` or `Fleet.trainer`",
        )
    if on_cpu and any(
        launch.parallelism.pipeline > 1 and launch.args.get("enforce-eager") for launch in launches
    ):
        # it makes the buffers between pipeline ranks as it warms up, which it then leaves out
        yield (
            "enforce-eager with pipeline_parallel_size: on CPU vLLM 0.32 dies of the first request",
            "args: {enforce-eager: false} for these servers",
        )
    yield from push_warnings(
        update_problem(moves_experts=bool(launch.args.get("enable-eplb"))) for launch in launches
    )
    bounds = ("gpu-memory-utilization", _KV_ARGUMENT)
    if not on_cpu and share_gpus and not all(set(bounds) & set(x.args) for x in launches):
        yield (
            "share_gpus: set `gpu-memory-utilization` under args; by default each server takes "
            "nine tenths of its GPU's memory",
            "args: {gpu-memory-utilization: 0.4}, or less",
        )


def drafting(config: Mapping[str, Any]) -> str:
    """How tokens are drafted by weights of their own, of a speculative configuration; "" if they
    are not.
    """
    if not config:
        return ""
    method = str(config.get("method") or config.get("model") or "a draft model")
    return "" if method.strip("[]") in _WEIGHTLESS_DRAFTS else method


def draft_reference(config: Mapping[str, Any]) -> str:
    """The draft model of a speculative configuration: a path, or a hub id with its revision."""
    parts = [str(config[key]) for key in ("model", "revision") if config.get(key)]
    return "@".join(parts) if config.get("model") else ""


def sizes(argv: Sequence[str], env: Mapping[str, str]) -> Sizes:
    """By what the command says, else by vLLM's defaults."""
    if _KV_VARIABLE in env:
        kv_bytes = max(0.0, finite_or(env[_KV_VARIABLE], 0.0)) * _GIB
    else:
        kv_bytes = number_after(f"--{_KV_ARGUMENT}", argv, 4 * _GIB)
    return Sizes(
        _CPU_SERVER_BYTES + int(kv_bytes),
        number_after("--gpu-memory-utilization", argv, _GPU_SHARE),
        int(number_after("--data-parallel-size", argv, 1)),
    )


def server_flags(arguments: Mapping[str, Any]) -> list[str]:
    """vLLM's command line: true → `--x`, false → `--no-x`, null → nothing, mapping → JSON."""
    flags: list[str] = []
    for name, value in arguments.items():
        flags += [f"--no-{name}"] if value is False else _flag(name, value)
    return flags


def router_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The router's command line: as vLLM's, but false is nothing, for it knows no `--no-x`."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        several = isinstance(value, list) and name in _ONE_VALUE_PER_FLAG
        for item in value if several else [value]:
            flags += _flag(name, item)
    return flags


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(_text(item) for item in value)]
    text = _text(value)
    if text.startswith("-"):
        # argparse would take a separate value with a leading dash for another option
        return [f"--{name}={text}"]
    return [f"--{name}", text]


def _text(value: Any) -> str:
    if isinstance(value, dict | bool):
        return json.dumps(value, separators=(",", ":"))
    return str(value)
