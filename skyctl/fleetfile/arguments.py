"""What a fleet file sets for servers and router: arguments, which of them skyctl keeps, and
settings that are allowed but probably a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyctl.engines import ENGINES
from skyctl.engines.launches import ServerLaunch
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.sections import ReplicaGroup, RouterSection
from skyctl.fleetfile.values import is_loopback
from skyctl.fleetfile.yaml_source import Location

_SHORT_REQUEST_S = 300
_SMALL_SIZE = 4096
_LONG_INTERVAL_S = 30
_HEALTH_FAILURES = 3  # the router's default before it drops a worker


def flag_name(key: str) -> str:
    """`max_model_len`, `max-model-len` and `--max-model-len` are all `max-model-len`.

    Only the part before the first dot changes: in `compilation-config.cudagraph_mode` the rest
    names a field.
    """
    head, dot, field = key.strip().lstrip("-").partition(".")
    return head.replace("_", "-") + dot + field


def merge_arguments(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping with normalised names; later layers win, including their nulls."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update({flag_name(key): value for key, value in layer.items()})
    return merged


def refusals(config: FleetConfig) -> Iterator[tuple[Location, str]]:
    """Arguments and variables the file may not set, as (path of the key in the file, why)."""
    reserved = ENGINES[config.engine].reserved
    for where, part in _parts(config):
        yield from _refused(part.args, (*where, "args"), reserved.server_args)
        yield from _refused_env(part.env, (*where, "env"), reserved.env)
    if isinstance(config.router, RouterSection):
        yield from _refused(config.router.args, ("router", "args"), reserved.router_args)
    needed = ENGINES[config.engine].arguments.sleep if config.sleep_group else ""
    for location, value in server_arguments(config):
        if needed and flag_name(str(location[-1])) == needed and not value:
            yield location, f"`sleep_group` needs {needed}: leave it out, or write true"


def server_arguments(config: FleetConfig) -> Iterator[tuple[Location, Any]]:
    """Every server argument of the file, as (path of the key in the file, value)."""
    for where, part in _parts(config):
        for key, value in part.args.items():
            yield (*where, "args", key), value


def _parts(config: FleetConfig) -> Iterator[tuple[Location, FleetConfig | ReplicaGroup]]:
    """The parts of the file with `args` and `env` of servers, and where they are in it."""
    yield (), config
    for index, group in enumerate(config.groups):
        yield ("replicas", index), group


def _refused(
    arguments: Mapping[str, Any], where: Location, reserved: Mapping[str, str]
) -> Iterator[tuple[Location, str]]:
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
    env: Mapping[str, str], where: Location, reserved: Mapping[str, str]
) -> Iterator[tuple[Location, str]]:
    for key, value in env.items():
        if key in reserved:
            yield (*where, key), f"variable {key!r} is set by skyctl: {reserved[key]}"
        elif not key or "=" in key or "\0" in key + value:
            yield (*where, key), f"{key!r} is not the name of an environment variable"


class PlanWarning(str):
    """One warning line; `fix` is what to change in the fleet file."""

    fix: str

    def __new__(cls, message: str, fix: str = "") -> PlanWarning:
        warning = super().__new__(cls, message)
        warning.fix = fix
        return warning


def plan_warnings(
    config: FleetConfig,
    launches: Sequence[ServerLaunch],
    cpu_count: int,
    trainer_gpus: Sequence[int] = (),
) -> tuple[PlanWarning, ...]:
    """One warning per finding, in the order of the fleet file. `cpu_count` 0 is unknown."""
    engine = ENGINES[config.engine]
    return (
        *_server_warnings(config, launches[0].placement.device, launches[0].backend),
        *_port_warnings(config, len(launches)),
        *_size_warnings(config),
        *(
            PlanWarning(*advice)
            for advice in engine.arguments.warnings(launches, config.share_gpus)
        ),
        *_core_warnings(config, launches, cpu_count),
        *_router_warnings(config),
        *_tinker_warnings(config, launches, trainer_gpus),
        *_trainer_warnings(config),
    )


def _trainer_warnings(config: FleetConfig) -> Iterator[PlanWarning]:
    if config.trainer is not None and not is_loopback(config.trainer.host):
        yield PlanWarning(
            f"trainer.host {config.trainer.host}: the control token crosses the network "
            "unencrypted; a reader of it can replace the weights",
            "leave `trainer: host` out (127.0.0.1), and reach it through a tunnel or a TLS proxy",
        )


def _tinker_warnings(
    config: FleetConfig, launches: Sequence[ServerLaunch], trainer_gpus: Sequence[int]
) -> Iterator[PlanWarning]:
    tinker = config.tinker
    if tinker is not None and not is_loopback(tinker.host):
        yield PlanWarning(
            f"tinker.host {tinker.host}: its key and the training data cross the network "
            "unencrypted; a reader of the key can train, sample and delete checkpoints",
            "leave `tinker: host` out (127.0.0.1), and reach it through a tunnel or a TLS proxy",
        )
    shared = {*trainer_gpus}.intersection(
        gpu for launch in launches for gpu in launch.placement.gpus
    )
    if tinker is not None and shared:
        yield PlanWarning(
            f"tinker: trains on {', '.join(tinker.ranks)}: servers use that GPU, too",
            "lower their `gpu-memory-utilization`, and run `skyctl sleep` before each training "
            "step and `skyctl wake` after it; or name another GPU",
        )


def _server_warnings(config: FleetConfig, device: str, backend: str) -> Iterator[PlanWarning]:
    danger = ", and with the ipc backend run code in it" if backend == "ipc" else ""
    open_too = "; inference needs no key" if _inference_is_open(config) else ""
    if config.launcher in ("ssh", "ray"):
        yield PlanWarning(
            f"launcher {config.launcher}: tokens cross the network unencrypted; a reader of "
            f"the control token can replace the servers' weights{danger}{open_too}",
            "keep others out of the network between the machines",
        )
    elif not is_loopback(config.host):
        yield PlanWarning(
            f"host {config.host}: tokens cross the network unencrypted; a reader of the "
            f"control token can replace the servers' weights{danger}{open_too}",
            "leave `host` out (127.0.0.1), and let only the router be reached from outside",
        )
    if config.auth == "none":
        yield PlanWarning(
            "auth none: every user of this machine can pause the servers and replace their weights",
            "leave `auth` out, and hand clients the token: skyctl urls",
        )
        if device == "cuda" and backend == "" and config.weight_transfer.transport == "auto":
            yield PlanWarning(
                "auth none: weights go by disk, since servers of the ipc transport unpickle "
                "what any client sends them",
                "leave `auth` out, or leave a GPU free for nccl",
            )


def _inference_is_open(config: FleetConfig) -> bool:
    return config.auth != "all" and config.api_key_env is None


def _port_warnings(config: FleetConfig, replicas: int) -> Iterator[PlanWarning]:
    if config.ports is not None and len(config.ports) != replicas:
        few = len(config.ports) < replicas
        consequence = "the rest get free ones" if few else "the last ones are not used"
        yield PlanWarning(
            f"ports: {len(config.ports)} for {replicas} replicas; {consequence}",
            "name one port per replica, or leave `ports` out",
        )


def _size_warnings(config: FleetConfig) -> Iterator[PlanWarning]:
    sizes = {
        "weight_transfer.chunk_size": config.weight_transfer.chunk_size,
        "logs.max_size": config.logs.max_size,
    }
    if config.tinker is not None:
        sizes["tinker.max_body"] = config.tinker.max_body
    for key, size in sizes.items():
        if size < _SMALL_SIZE:
            yield PlanWarning(
                f"{key} is {size} bytes: a number without a unit counts bytes",
                f"write a unit, as in {key.rpartition('.')[2]}: {size}MiB",
            )


def _core_warnings(
    config: FleetConfig, launches: Sequence[ServerLaunch], cpu_count: int
) -> Iterator[PlanWarning]:
    workers = sum(launch.parallelism.world_size for launch in launches)
    if launches[0].placement.device == "cpu" and 0 < cpu_count < workers:
        key = "replicas" if config.scale is None else "scale: max"
        yield PlanWarning(f"{workers} workers share {cpu_count} CPU cores", f"lower `{key}`")


def _router_warnings(config: FleetConfig) -> Iterator[PlanWarning]:
    router = config.router
    if not isinstance(router, RouterSection) or not router.enabled:
        return
    if not is_loopback(router.host):
        open_too = "; inference needs no key" if _inference_is_open(config) else ""
        yield PlanWarning(
            f"router.host {router.host}: the router's own routes need no token; every client "
            f"that reaches it can take servers out and put others in{open_too}",
            "leave `router.host` out (127.0.0.1), and put a proxy in front that lets only /v1 "
            "through",
        )
    if router.request_timeout_s < _SHORT_REQUEST_S:
        yield PlanWarning(
            f"router.request_timeout_s {router.request_timeout_s}: longer requests are cut, "
            "and time frozen by `pause --mode keep` counts",
            "leave it out (1800), or raise it to 300 or more",
        )
    if router.health_interval_s > _LONG_INTERVAL_S:
        yield PlanWarning(
            f"router.health_interval_s {router.health_interval_s}: a dead server may be sent "
            f"requests for {_HEALTH_FAILURES * router.health_interval_s} s",
            "leave it out (5)",
        )
