"""Pure planning: a fleet's configuration becomes a plan."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import config_of, locate
from skyctl.core.pinning import DEVICE, Pins, model_of, references, with_revisions
from skyctl.core.placement import (
    Place,
    Replica,
    expand_replicas,
    followers,
    leading,
    master_of,
    place_replicas,
)
from skyctl.core.plan import FleetPlan, FrontSpec, RouterSpec, ServerSpec
from skyctl.core.tinker import TinkerSettings, longest, storage_directory
from skyctl.engines import ENGINES, require, routing
from skyctl.engines.base import Feature
from skyctl.engines.launches import (
    Access,
    AdapterLimits,
    Device,
    HandOver,
    RouterLaunch,
    ServedModel,
    ServerLaunch,
    ServerPlacement,
    Span,
)
from skyctl.errors import FleetFileError, UsageError
from skyctl.fleetfile.arguments import merge_arguments, plan_warnings, refusals
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.sections import RouterSection
from skyctl.fleetfile.values import resolve_relative
from skyctl.launch.base import PORT_AT_SPAWN, Cpu, Gpu, Machine, Node
from skyctl.launch.local.devices import visible_gpus
from skyctl.store.credentials import AT_SPAWN
from skyctl.store.paths import expanded

_PORT_TRIES = 1000


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
    machines: Sequence[Machine] = (),
    pins: Pins | None = None,
) -> FleetPlan:
    """Everything `skyctl up` will start, from the file and what the machine has.

    Pure but for looking whether the model is a local directory. Ports come from the file, else
    from `known_ports` (server name, "router" or "router-metrics" → the port it already has), else
    from `next_port`. `environ` is the environment the servers will inherit. Without `cpus`, the
    engine chooses the cores of CPU servers. With `machines` servers run on those, and the router
    here. `pins` says what models mean.

    Raises:
        FleetFileError: the file sets an argument or variable that skyctl keeps to itself.
        UsageError: the fleet is attached, its API key is not set, the engine has no router, or the
            weight transport does not go with the device.
    """
    if config.attached:
        raise UsageError(
            f"fleet {config.name!r} is attached to running servers: there is nothing to start"
        )
    for _, reason in refusals(config):
        raise FleetFileError(reason)
    local = Machine(None, tuple(visible_gpus(gpus, environ)), tuple(cpus), next_port)
    ports = known_ports or {}
    return _Planner(config, base_dir, local, environ, ports, python, machines, pins or {}).plan()


@dataclass
class _Planner:
    """The steps of one `plan_fleet` call, which share its inputs."""

    config: FleetConfig
    """The fleet file."""
    base_dir: Path
    """What the file's relative paths are relative to."""
    local: Machine
    """This machine."""
    environ: Mapping[str, str]
    """The environment of the command."""
    known_ports: Mapping[str, int]
    """Ports to keep, by name."""
    own_python: str
    """The interpreter for a file that names none."""
    machines: Sequence[Machine]
    """The file's machines; empty for this one."""
    pins: Pins
    """What models mean while the fleet is up."""

    def __post_init__(self) -> None:
        config, base_dir = self.config, self.base_dir
        self.engine = ENGINES[config.engine]
        self.python = interpreter(config.python, base_dir) if config.python else self.own_python
        self.replicas = expand_replicas(config)
        self.remote = bool(self.machines)
        self.machines = self.machines or (self.local,)
        visible = DEVICE in self.pins or all(machine.gpus for machine in self.machines)
        self.trainer = self._trainer_node()
        self.device: Device = (
            ("cuda" if visible else "cpu") if config.device == "auto" else config.device
        )
        written = model_of(config, base_dir)
        self.model_path = self.pins.get(written, written)
        self.local_model = Path(self.model_path).is_dir()
        # links are not followed: what clients ask for stays when one moves
        self.served_model_name = config.served_model_name or (
            Path(written).name if Path(written).is_absolute() else written
        )
        self.taken = self._ports_of_the_file() | set(self.known_ports.values())

    def plan(self) -> FleetPlan:
        config, on_gpus = self.config, self.device == "cuda"
        placed = place_replicas(
            self.replicas,
            self.machines,
            allowed=self._allowed_gpus(),
            on_gpus=on_gpus,
            share=config.share_gpus,
        )
        transfer = config.weight_transfer
        transport = transfer.transport
        if self.remote and transport == "auto":
            transport = "disk"
        free = self._free_gpus(placed) if on_gpus and not self.remote else ()
        backend = transfer.backend or self.engine.transfer.backend(
            transport, self.device, free, config.auth
        )
        api_key = self._own_api_key()
        launches = [
            self._launch(replica, place, backend, api_key)
            for replica, place in zip(self.replicas, placed, strict=True)
        ]
        servers = self._as_many_as_run(map(self._server, self.replicas, launches, placed))
        router = self._router(config.router)
        return FleetPlan(
            name=config.name,
            device=self.device,
            model_path=self.model_path,
            served_model_name=self.served_model_name,
            servers=servers,
            router=router,
            config=config,
            warnings=plan_warnings(
                config,
                launches,
                sum(len(machine.cpus) for machine in self.machines),
                () if self.remote else self._trainer_gpus(),
            ),
            base_dir=self.base_dir,
            python=self.python,
            free_gpus=free,
            tinker=self._tinker(router or servers[0], servers[0].base),
            pins=self._kept_pins(),
        )

    def _kept_pins(self) -> dict[str, str]:
        auto = self.config.device == "auto" and self.device == "cuda"
        return {**self.pins, **({DEVICE: self.device} if auto else {})}

    def _as_many_as_run(self, servers: Iterable[ServerSpec]) -> tuple[ServerSpec, ...]:
        """All servers; where load decides how many run, so many of them: first those that have a
        port. Each keeps its place among as many as there may be, so no other restarts for it.
        """
        possible = tuple(servers)
        if not isinstance(count := self.config.replicas, int):
            return possible
        order = {name: number for number, name in enumerate(self.known_ports)}
        by_port = sorted(possible, key=lambda spec: order.get(spec.name, len(order)))
        chosen = {spec.name for spec in by_port[:count]}
        return tuple(spec for spec in possible if spec.name in chosen)

    def _allowed_gpus(self) -> Sequence[int] | None:
        """Those of the file, else all but the trainer's; None is all."""
        trainer = self._trainer_gpus()
        if self.config.gpus is not None or not trainer or self.remote:
            return self.config.gpus
        return [gpu.index for gpu in self.local.gpus if gpu.index not in trainer]

    def _trainer_node(self) -> Node | None:
        """The machine that trains, None for this one. Its GPUs are kept from servers there."""
        section = self.config.tinker
        for machine in self.machines:
            if section and machine.node and machine.node.target == section.machine:
                free = tuple(gpu for gpu in machine.gpus if gpu.index not in section.gpus)
                others = (replace(m, gpus=free) if m is machine else m for m in self.machines)
                self.machines = tuple(others)
                return machine.node
        return None

    def _trainer_gpus(self) -> tuple[int, ...]:
        """The GPUs of this machine that the Tinker API trains on."""
        section = self.config.tinker
        numbers = section.gpus if section is not None and self.trainer is None else ()
        visible = self.local.gpus
        return tuple(visible[number].index for number in numbers if number < len(visible))

    def _free_gpus(self, placed: Sequence[Place]) -> tuple[int, ...]:
        """Those that no server uses. Only of this machine: a push's sender runs here."""
        used = {gpu for place in placed for gpu in place.gpus} | {*self._trainer_gpus()}
        gpus = self.config.gpus
        allowed = [gpu.index for gpu in self.local.gpus] if gpus is None else gpus
        return tuple(gpu for gpu in allowed if gpu not in used)

    def _launch(
        self, replica: Replica, place: Place, backend: str, api_key: str | None
    ) -> ServerLaunch:
        lora, node = self.config.lora, place.machine.node
        port: int | str = PORT_AT_SPAWN
        if node is None or node.chosen:
            port = replica.port or self._port(replica.name, place.machine.next_port)
        args = with_revisions(
            self.engine, self.model_path, self._with_absolute_paths(replica.args), self.pins
        )
        config = self._model_config(args) if lora is not None else None
        return ServerLaunch(
            python=node.python if node else self.python,
            model=ServedModel(self.model_path, self.served_model_name, self.local_model, config),
            host=node.address if node else self.config.host,
            port=port,
            placement=ServerPlacement(
                self.device, place.gpus, place.cores, self._span(replica, place)
            ),
            backend=backend,
            args=args,
            env=replica.env,
            environ={} if node else self.environ,
            access=Access(AT_SPAWN, self.config.auth, api_key),
            parallelism=replica.parallelism,
            own_python=node is not None or self.config.python is None,
            adapters=None if lora is None else AdapterLimits(lora.max_adapters, lora.max_rank),
            hand_over=self._hand_over(replica, place),
        )

    def _model_config(self, args: Mapping[str, Any]) -> Mapping[str, Any] | None:
        revision = None if self.local_model else args.get("revision")
        return config_of(f"{self.model_path}@{revision}" if revision else self.model_path)

    def _hand_over(self, replica: Replica, place: Place) -> HandOver | None:
        if not replica.role:
            return None
        require(self.config.engine, Feature.PAIRS)
        port = self._port(f"{replica.name}-kv", place.machine.next_port)
        return HandOver(replica.role, port, self.config.kv_lease_s)

    def _span(self, replica: Replica, place: Place) -> Span | None:
        if not place.others:
            return None
        require(self.config.engine, Feature.SPAN)
        port = self._port(master_of(replica.name), place.machine.next_port)
        return leading(place, port)

    def _server(self, replica: Replica, launch: ServerLaunch, place: Place) -> ServerSpec:
        command, span = self.engine.server_command(launch), launch.placement.span
        return ServerSpec(
            name=replica.name,
            argv=command.argv,
            env=command.env,
            host=launch.host,
            port=launch.port if isinstance(launch.port, int) else 0,
            gpus=place.gpus,
            world_size=replica.parallelism.world_size,
            backend=launch.backend,
            engine=self.engine.name,
            node=place.machine.node,
            role=replica.role,
            followers=tuple(followers(self.engine, launch, place)),
            master_port=span.port if span else 0,
            commits={
                self.pins[str(reference)]: reference.revision
                for reference in references(self.engine, self.model_path, replica.args)
                if str(reference) in self.pins
            },
        )

    def _own_api_key(self) -> str | None:
        name = self.config.api_key_env
        if name is None:
            return None
        if not self.environ.get(name):
            raise UsageError(
                f"the fleet's API key is not set: api_key_env names {name}",
                hint=f"export {name}=…",
            )
        return self.environ[name]

    def _router(self, section: RouterSection | str) -> RouterSpec | None:
        if isinstance(section, str) or not section.enabled:
            return None
        launch = RouterLaunch(
            python=self.python,
            host=section.host,
            port=section.port or self._port("router"),
            metrics_port=section.metrics_port or self._port("router-metrics"),
            policy=section.policy,
            health_interval_s=section.health_interval_s,
            request_timeout_s=section.request_timeout_s,
            args=self._with_absolute_paths(merge_arguments(section.args)),
            pairs=self.config.pairs,
        )
        argv = routing(self.engine.name).command(launch)
        return RouterSpec(argv, dict(section.env), launch.host, launch.port, launch.metrics_port)

    def _tinker(self, entry: FrontSpec | ServerSpec, base: str) -> FrontSpec | None:
        section, lora = self.config.tinker, self.config.lora
        if section is None or lora is None:  # the schema has both or no `tinker`
            return None
        storage = storage_directory(section.storage, self.base_dir)
        settings = TinkerSettings(
            fleet=self.config.name,
            model=str(locate(base) or self.model_path),  # trained where the servers started
            base_model=section.base_model or self.served_model_name,
            host=section.host,
            port=section.port,
            storage=str(storage) if storage else None,
            devices=section.ranks,
            machine=asdict(self.trainer) if self.trainer else None,
            shard_base=section.shard_base,
            dtype=section.dtype,
            threads=section.threads,
            batch_tokens=section.batch_tokens,
            gradient_checkpointing=section.recomputes,
            max_rank=section.max_rank,
            full_parameters=section.full_parameters,
            join_requests=section.joins,
            open_models=section.open_models,
            parked_memory=section.parked_memory,
            keep_runs_s=section.keep_runs_s,
            keep_samplers=section.keep_samplers,
            keep_samplers_s=section.keep_samplers_s,
            max_body=section.max_body,
            max_adapters=lora.max_adapters,
            context=longest(self.config.args),
            entry=entry.url,
            served_model_name=self.served_model_name,
            key_source=self.config.api_key_env or ("file" if self.config.auth == "all" else None),
        )
        argv = (self.own_python, "-m", "skyctl.tinker", settings.argument())
        # numbered as nvidia-smi does, and the servers
        env = {} if not section.gpus else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return FrontSpec(argv, env, section.host, section.port)

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
        if self.config.tinker is not None:
            ports.add(self.config.tinker.port)
        if self.config.trainer is not None:
            ports.add(self.config.trainer.port)
        return ports

    def _port(self, owner: str, next_port: Callable[[], int] | None = None) -> int:
        if port := self.known_ports.get(owner):
            return port
        for _ in range(_PORT_TRIES):
            port = (next_port or self.local.next_port)()
            if port and port not in self.taken:
                self.taken.add(port)
                return port
        raise UsageError(f"no free port for {owner}")


def interpreter(python: str, base_dir: Path) -> str:
    """The interpreter's path. Links are kept: a virtual environment's python is one."""
    path = str(expanded(python))
    return os.path.normpath(base_dir / path) if os.sep in python else path
