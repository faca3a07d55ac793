"""Pure planning: a fleet's configuration becomes exact argv, environment, ports and GPUs."""

from __future__ import annotations

import json
import os.path
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import InstanceOf

from skyctl.core.placement import Replica, bind_to_cores, expand_replicas, place_on_gpus
from skyctl.core.plan_warnings import PlanWarning, plan_warnings
from skyctl.engines.vllm.arguments import router_flags, server_flags
from skyctl.engines.vllm.guarding import guard_env, guard_flags
from skyctl.engines.vllm.inside.wire import SPIN_VARIABLE
from skyctl.errors import FleetFileError, UsageError
from skyctl.fleetfile.arguments import merge_arguments, refusals
from skyctl.fleetfile.schema import FleetConfig, RouterSection, resolve_relative
from skyctl.launch.local.devices import Cpu, Gpu, visible_gpus

Device = Literal["cpu", "cuda"]

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
ROUTER_MODULE = "vllm_router.launch_router"
CPU_BACKEND = "skyctl"
WORKER_EXTENSION = "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension"

_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PORT_TRIES = 1000
_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class ServerSpec:
    """Everything needed to start one vLLM server.

    `env` holds only what is added to the inherited environment. `world_size` counts its workers:
    tensor x pipeline x data parallel. `gpus` are physical indices, empty on CPU. `backend` is the
    weight-transfer backend the server is started with, or "" for none.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)  # may hold the API key
    host: str
    port: int
    gpus: tuple[int, ...] = ()
    world_size: int = 1
    backend: str = ""

    @property
    def url(self) -> str:
        """URL clients on this machine use (a wildcard bind is reached over loopback)."""
        return local_url(self.host, self.port)

    def to_json(self) -> dict[str, Any]:
        """All fields and `url`; secrets in `env` are masked."""
        return {
            "name": self.name,
            "url": self.url,
            "host": self.host,
            "port": self.port,
            "gpus": list(self.gpus),
            "world_size": self.world_size,
            "backend": self.backend,
            "argv": list(self.argv),
            "env": masked(self.env),
        }


@dataclass(frozen=True)
class RouterSpec:
    """Everything needed to start the router, but for the worker URLs appended at start."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    host: str
    port: int
    metrics_port: int

    @property
    def url(self) -> str:
        return local_url(self.host, self.port)

    def to_json(self) -> dict[str, Any]:
        """All fields and `url`; secrets in `env` are masked."""
        return {
            "url": self.url,
            "host": self.host,
            "port": self.port,
            "metrics_port": self.metrics_port,
            "argv": list(self.argv),
            "env": masked(self.env),
        }


@dataclass(frozen=True)
class FleetPlan:
    """A fleet ready to start. `device` is resolved; `model_path` is absolute or a hub id.

    `free_gpus` are GPUs the fleet may use and no server does: a push's sender can run there.
    """

    name: str
    device: Device
    model_path: str
    served_model_name: str
    servers: tuple[ServerSpec, ...]
    router: RouterSpec | None
    config: FleetConfig
    warnings: tuple[InstanceOf[PlanWarning], ...] = field(default=())
    base_dir: Path = Path()
    python: str = sys.executable
    free_gpus: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What `skyctl plan --json` prints. Secrets are replaced by `***`."""
        return {
            "name": self.name,
            "device": self.device,
            "model_path": self.model_path,
            "served_model_name": self.served_model_name,
            "python": self.python,
            "base_dir": str(self.base_dir),
            "free_gpus": list(self.free_gpus),
            "servers": [server.to_json() for server in self.servers],
            "router": None if self.router is None else self.router.to_json(),
            "warnings": list(self.warnings),
        }


def local_url(host: str, port: int) -> str:
    """URL of a server bound to `host`, as seen from this machine."""
    if host in _WILDCARDS:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with the values of variables that are named like secrets replaced by `***`."""
    return {
        name: "***" if any(word in name.upper() for word in _SECRET_WORDS) else value
        for name, value in env.items()
    }


def plan_fleet(
    config: FleetConfig,
    base_dir: Path,
    *,
    gpus: Sequence[Gpu],
    next_port: Callable[[], int],
    environ: Mapping[str, str],
    cpus: Sequence[Cpu] = (),
    known_ports: Mapping[str, int] | None = None,
    python: str = sys.executable,
) -> FleetPlan:
    """Everything `skyctl up` will start, from the file and what the machine has.

    Pure but for looking whether the model is a local directory. Ports come from the file, else
    from `known_ports` (server name, "router" or "router-metrics" → the port it already has), else
    from `next_port`. `environ` is the environment the servers will inherit. Without `cpus`, vLLM
    chooses the cores of CPU servers.

    Raises:
        FleetFileError: the file sets an argument or variable that skyctl keeps to itself.
        UsageError: the fleet is attached, its API key is not set, or the weight transport does
            not go with the device.
    """
    if config.attached:
        raise UsageError(
            f"fleet {config.name!r} is attached to running servers: there is nothing to start"
        )
    for _, reason in refusals(config):
        raise FleetFileError(reason)
    return _Planner(
        config, base_dir, gpus, next_port, environ, cpus, known_ports or {}, python
    ).plan()


class _Planner:
    """The steps of one `plan_fleet` call, which share its inputs."""

    def __init__(
        self,
        config: FleetConfig,
        base_dir: Path,
        gpus: Sequence[Gpu],
        next_port: Callable[[], int],
        environ: Mapping[str, str],
        cpus: Sequence[Cpu],
        known_ports: Mapping[str, int],
        python: str,
    ) -> None:
        self.config = config
        self.base_dir = base_dir
        self.next_port = next_port
        self.environ = environ
        self.cpus = cpus
        self.known_ports = known_ports
        self.python = interpreter(config.python, base_dir) if config.python else python
        self.replicas = expand_replicas(config)
        visible = [gpu.index for gpu in visible_gpus(gpus, environ)]
        self.allowed_gpus = visible if config.gpus is None else list(config.gpus)
        self.device: Device = (
            ("cuda" if visible else "cpu") if config.device == "auto" else config.device
        )
        assert config.model is not None  # the schema asks for it where servers are started
        self.model_path = resolve_relative(config.model, base_dir)
        self.local_model = Path(self.model_path).is_dir()
        self.served_model_name = config.served_model_name or (
            Path(self.model_path).name if Path(self.model_path).is_absolute() else self.model_path
        )
        self.taken = self._ports_of_the_file() | set(self.known_ports.values())

    def plan(self) -> FleetPlan:
        config, on_gpus = self.config, self.device == "cuda"
        placed = (
            place_on_gpus(self.replicas, self.allowed_gpus, share=config.share_gpus)
            if on_gpus
            else [()] * len(self.replicas)
        )
        bindings = bind_to_cores([replica.world_size for replica in self.replicas], self.cpus)
        used = {gpu for replica_gpus in placed for gpu in replica_gpus}
        free = tuple(gpu for gpu in self.allowed_gpus if on_gpus and gpu not in used)
        backend = _backend(config, self.device, free)
        servers = tuple(
            self._server(replica, replica_gpus, binding, backend)
            for replica, replica_gpus, binding in zip(self.replicas, placed, bindings, strict=True)
        )
        return FleetPlan(
            name=config.name,
            device=self.device,
            model_path=self.model_path,
            served_model_name=self.served_model_name,
            servers=servers,
            router=self._router(config.router),
            config=config,
            warnings=plan_warnings(config, self.replicas, self.device, backend, len(self.cpus)),
            base_dir=self.base_dir,
            python=self.python,
            free_gpus=free,
        )

    def _server(
        self, replica: Replica, gpus: tuple[int, ...], binding: str | None, backend: str
    ) -> ServerSpec:
        port = replica.port or self._port(replica.name)
        argv = [self.python, "-m", SERVER_MODULE, "--model", self.model_path]
        argv += ["--served-model-name", self.served_model_name]
        argv += ["--host", self.config.host, "--port", str(port)]
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if (size := getattr(replica, name)) > 1:
                argv += ["--" + name.replace("_", "-"), str(size)]
        if backend:
            transfer = json.dumps({"backend": backend}, separators=(",", ":"))
            argv += ["--weight-transfer-config", transfer]
        arguments = merge_arguments(self._default_arguments(), replica.args)
        if self.device == "cpu" and arguments.get("enable-sleep-mode"):
            del arguments["enable-sleep-mode"]  # vLLM refuses to start with it on CPU
        argv += server_flags(self._with_absolute_paths(arguments))
        argv += guard_flags(self.config)
        return ServerSpec(
            name=replica.name,
            argv=tuple(argv),
            env=self._server_env(replica, gpus, binding, backend),
            host=self.config.host,
            port=port,
            gpus=gpus,
            world_size=replica.world_size,
            backend=backend,
        )

    def _default_arguments(self) -> dict[str, Any]:
        """What skyctl adds unless the file says otherwise."""
        if self.device == "cuda":
            # the digest that verifies a push takes milliseconds there; vLLM's own checksums copy
            # the model out and take 22 s for 16 GB. Another interpreter may not have skyctl.
            own = {} if self.config.python else {"worker-extension-cls": WORKER_EXTENSION}
            return {"enable-sleep-mode": True, **own}
        # float32: vLLM's bfloat16 CPU kernels can die with SIGILL on virtual machines that
        # advertise AMX but do not let it be used; and CPU pushes are compared bit for bit.
        return {"dtype": "float32", "worker-extension-cls": WORKER_EXTENSION}

    def _server_env(
        self, replica: Replica, gpus: tuple[int, ...], binding: str | None, backend: str
    ) -> dict[str, str]:
        defaults: dict[str, str] = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.local_model:
            defaults["HF_HUB_OFFLINE"] = "1"  # a local checkpoint needs nothing from the hub
        if self.device == "cpu":
            defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; vLLM takes 4 for each replica
            defaults[SPIN_VARIABLE] = "0.02"
            if binding is not None:
                defaults["VLLM_CPU_OMP_THREADS_BIND"] = binding
        env = {name: value for name, value in defaults.items() if name not in self.environ}
        env.update(replica.env)
        env["VLLM_SERVER_DEV_MODE"] = "1"
        if self.device == "cuda":
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that indices mean what nvidia-smi shows
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        if backend == "ipc":
            # CUDA IPC handles travel pickled in the body of /update_weights
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return env | guard_env(self.config, env, self.environ)

    def _router(self, section: RouterSection | str) -> RouterSpec | None:
        if isinstance(section, str) or not section.enabled:
            return None
        port = section.port or self._port("router")
        metrics_port = section.metrics_port or self._port("router-metrics")
        arguments = {
            "host": section.host,
            "port": port,
            "policy": section.policy,
            "prometheus-host": section.host,
            "prometheus-port": metrics_port,
            "health-check-interval-secs": section.health_interval_s,
            "request-timeout-secs": section.request_timeout_s,
        }
        flags = router_flags(self._with_absolute_paths(merge_arguments(arguments, section.args)))
        argv = (self.python, "-m", ROUTER_MODULE, *flags)
        return RouterSpec(argv, dict(section.env), section.host, port, metrics_port)

    def _with_absolute_paths(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Values written like relative paths (`./chat.jinja`) are relative to the fleet file."""
        return {
            name: resolve_relative(value, self.base_dir)
            if isinstance(value, str) and value.startswith(("./", "../", "~/"))
            else value
            for name, value in arguments.items()
        }

    def _ports_of_the_file(self) -> set[int]:
        ports = {replica.port for replica in self.replicas if replica.port is not None}
        router = self.config.router
        if isinstance(router, RouterSection):
            ports.update(port for port in (router.port, router.metrics_port) if port is not None)
        return ports

    def _port(self, owner: str) -> int:
        if owner in self.known_ports:
            return self.known_ports[owner]
        for _ in range(_PORT_TRIES):
            if (port := self.next_port()) not in self.taken:
                self.taken.add(port)
                return port
        raise UsageError(f"no free port for {owner}")


def interpreter(python: str, base_dir: Path) -> str:
    """The interpreter's path. Links are kept: a virtual environment's python is one."""
    path = str(Path(python).expanduser())
    return os.path.normpath(base_dir / path) if os.sep in python else path


def _backend(config: FleetConfig, device: Device, free_gpus: Sequence[int]) -> str:
    """The weight-transfer backend servers start with; "" for none.

    On CPU one backend serves both gloo and shm. On CUDA, NCCL needs a GPU for the sender that no
    worker uses; CUDA IPC does not, but its servers unpickle what they are sent: only with a token.
    """
    transport = config.weight_transfer.transport
    if transport == "disk":
        return ""
    if device == "cpu":
        if transport in ("nccl", "ipc"):
            raise UsageError(
                f"weight_transfer.transport {transport!r} needs GPUs, and this fleet runs on CPU",
                hint="use auto, gloo, shm or disk",
            )
        return CPU_BACKEND
    if transport in ("gloo", "shm"):
        raise UsageError(
            f"weight_transfer.transport {transport!r} is for CPU servers, and this fleet runs on "
            "GPUs",
            hint="use auto, nccl, ipc or disk",
        )
    if transport == "auto":
        return "nccl" if free_gpus else "ipc" if config.auth != "none" else ""
    return transport
