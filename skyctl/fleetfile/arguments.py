"""vLLM and router arguments as the fleet file writes them, and which of them skyctl keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyctl.fleetfile.schema import FleetConfig, RouterSection

# What skyctl sets itself, and what to write instead. Overriding these would make a server that
# skyctl cannot reach, push to or account for.
RESERVED_SERVER_ARGS = {
    "host": "use the key `host`",
    "port": "use the key `ports`",
    "uds": "skyctl reaches servers over TCP; use `host` and `ports`",
    "model": "use the key `model`",
    "model-tag": "use the key `model`",
    "served-model-name": "use the key `served_model_name`",
    "tensor-parallel-size": "use the key `tensor_parallel_size`",
    "tp": "use the key `tensor_parallel_size`",
    "pipeline-parallel-size": "use the key `pipeline_parallel_size`",
    "pp": "use the key `pipeline_parallel_size`",
    "data-parallel-size": "use the key `data_parallel_size`",
    "dp": "use the key `data_parallel_size`",
    "weight-transfer-config": "use the key `weight_transfer`",
    "enable-lora": "use the key `lora`",
    "max-loras": "use the key `lora.max_adapters`",
    "max-cpu-loras": "use the key `lora.max_adapters`",
    "max-lora-rank": "use the key `lora.max_rank`",
    "lora-modules": "use the key `lora.adapters`",
    "api-key": "use the key `api_key_env`; keys never go on a command line",
    "hf-token": "set HF_TOKEN in the environment; tokens never go on a command line",
    "config": "write its settings under `args`",
    "ssl-keyfile": "skyctl talks plain HTTP to its servers; end TLS in front of the router",
    "ssl-certfile": "skyctl talks plain HTTP to its servers; end TLS in front of the router",
}
RESERVED_ROUTER_ARGS = {
    "host": "use the key `router.host`",
    "port": "use the key `router.port`",
    "prometheus-port": "use the key `router.metrics_port`",
    "policy": "use the key `router.policy`",
    "health-check-interval-secs": "use the key `router.health_interval_s`",
    "request-timeout-secs": "use the key `router.request_timeout_s`",
    "worker-urls": "skyctl adds each server when it is ready",
    "api-key": "use the key `api_key_env`; keys never go on a command line",
}
RESERVED_ENV = {
    "CUDA_VISIBLE_DEVICES": "use the key `gpus`",
    "VLLM_API_KEY": "use the key `api_key_env`",
    "SKYCTL_CONTROL_TOKEN": "skyctl makes it; see the key `auth`",
    "VLLM_SERVER_DEV_MODE": "skyctl needs it on: every control call is a development route",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "use the key `lora`",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "skyctl sets it when the transport needs it (ipc)",
}


def flag_name(key: str) -> str:
    """`max_model_len`, `max-model-len` and `--max-model-len` are all `max-model-len`.

    Only the part before the first dot changes: in `compilation-config.cudagraph_mode` the rest
    names a field.
    """
    head, dot, rest = key.strip().lstrip("-").partition(".")
    return head.replace("_", "-") + dot + rest


def merge_arguments(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping with normalised names; later layers win, their nulls too."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update({flag_name(key): value for key, value in layer.items()})
    return merged


def refusals(config: FleetConfig) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Arguments and variables the file may not set, as (path of the key in the file, why)."""
    yield from _refused(config.args, ("args",), RESERVED_SERVER_ARGS)
    yield from _refused_env(config.env, ("env",))
    if isinstance(config.replicas, list):
        for index, group in enumerate(config.replicas):
            where: tuple[str | int, ...] = ("replicas", index)
            yield from _refused(group.args, (*where, "args"), RESERVED_SERVER_ARGS)
            yield from _refused_env(group.env, (*where, "env"))
    if isinstance(config.router, RouterSection):
        yield from _refused(config.router.args, ("router", "args"), RESERVED_ROUTER_ARGS)


def server_arguments(config: FleetConfig) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every vLLM argument of the file, as (path of the key in the file, value)."""
    yield from ((("args", key), value) for key, value in config.args.items())
    for index, group in enumerate(config.replicas if isinstance(config.replicas, list) else ()):
        where = ("replicas", index, "args")
        yield from (((*where, key), value) for key, value in group.args.items())


def _refused(
    arguments: Mapping[str, Any], where: tuple[str | int, ...], reserved: Mapping[str, str]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    seen: dict[str, str] = {}
    for key in arguments:
        name = flag_name(key)
        if not name or any(character.isspace() or character == "=" for character in name):
            yield (*where, key), f"{key!r} is not the name of an argument"
        elif name in reserved:
            yield (*where, key), f"argument {key!r} is set by skyctl: {reserved[name]}"
        elif name in seen:
            yield (*where, key), f"argument {key!r} was already written as {seen[name]!r}"
        seen.setdefault(name, key)


def _refused_env(
    env: Mapping[str, str], where: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for key, value in env.items():
        if key in RESERVED_ENV:
            yield (*where, key), f"variable {key!r} is set by skyctl: {RESERVED_ENV[key]}"
        elif not key or "=" in key or "\0" in key + value:
            yield (*where, key), f"{key!r} is not the name of an environment variable"
