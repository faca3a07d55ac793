"""From a fleet's configuration to a plan for this machine, with the ports its replicas have."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from skyctl.core.check import check_plan, model_advice
from skyctl.core.pinning import Pins, moved, pin
from skyctl.core.placement import expand_replicas, master_of
from skyctl.core.plan import FleetPlan, config_digest
from skyctl.core.planner import plan_fleet
from skyctl.errors import UsageError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.sections import RouterSection
from skyctl.fleetfile.values import MOST_REPLICAS
from skyctl.fleetfile.yaml_source import YamlSource
from skyctl.launch import HOSTS
from skyctl.launch.base import ADDRESS_AT_SPAWN, Machine, Node, RayCluster
from skyctl.launch.remote.machines import read_machines
from skyctl.launch.remote.record import begun
from skyctl.startup import inherited_environment
from skyctl.store.paths import fleet_paths
from skyctl.store.processes import ProcessRow


def plan_here(
    config: FleetConfig,
    base_dir: Path,
    *,
    known_ports: Mapping[str, int] | None = None,
    pins: Pins | None = None,
) -> FleetPlan:
    """`plan_fleet` with the GPUs, CPU cores and free ports of its machines. `pins` are those of a
    fleet that is up.

    Raises:
        UsageError: as `plan_fleet`.
        HostUnreachable: another machine cannot be asked, and the fleet does not run there already.
    """
    host = HOSTS[config.launcher]
    machines: Sequence[Machine] = ()
    if nodes := nodes_of(config):
        machines = read_machines(
            nodes,
            ports=2 * len(expand_replicas(config)) + 8,
            cache=fleet_paths(config.name).directory / "machines.json",
            running=bool(known_ports),
        )
    meanings = pin(config, base_dir, os.environ, pins or {})
    plan = plan_fleet(
        config,
        base_dir,
        gpus=[] if config.device == "cpu" else host.gpus(),
        cpus=host.cpus(),
        next_port=lambda: host.free_port("127.0.0.1"),
        environ=inherited_environment(),
        known_ports=known_ports,
        machines=machines,
        pins=meanings,
    )
    advice = (*moved(config, base_dir, os.environ, meanings), *model_advice(plan))
    return replace(plan, warnings=(*plan.warnings, *advice))


def nodes_of(config: FleetConfig) -> list[Node]:
    """Other machines that servers run on; a cluster counts as one until it has chosen a node."""
    ssh, ray = config.ssh, config.ray
    if config.launcher == "ray":
        cluster = RayCluster(
            ray.address,
            labels=tuple(sorted(ray.nodes.items())),
            head=ray.head,
            spread=ray.strategy == "spread",
            allow_unauthenticated=ray.allow_unauthenticated,
        )
        return [Node("", ADDRESS_AT_SPAWN, ray.python, (), ray.orphan_grace_s, cluster).cluster]
    return [
        Node(target, target.rpartition("@")[2], ssh.python, tuple(ssh.command), ssh.orphan_grace_s)
        for target in ssh.hosts
    ]


def plan_offline(config: FleetConfig, base_dir: Path) -> FleetPlan:
    """`plan_fleet` without looking at the machine: ports and keys are made up, GPUs are unknown.

    Raises:
        UsageError: as `plan_fleet`, except for an API key that is not set.
    """
    if config.device == "auto" and config.weight_transfer.transport in ("nccl", "ipc"):
        config = config.model_copy(update={"device": "cuda"})  # it is meant for a GPU machine
    environ = {} if config.api_key_env is None else {config.api_key_env: "not looked up"}
    next_port = itertools.count(20000).__next__
    machines = [Machine(node, (), (), next_port) for node in nodes_of(config)]
    return plan_fleet(
        config, base_dir, gpus=[], next_port=next_port, environ=environ, machines=machines
    )


def planned(
    config: FleetConfig,
    base_dir: Path,
    ports: Mapping[str, int],
    *,
    pins: Pins | None = None,
    router: bool = True,
    tinker: bool = True,
) -> FleetPlan:
    """The plan of a fleet; what already runs keeps its `ports` and `pins`. False leaves that front
    out.
    """
    if not router:  # the Tinker API bypasses it then
        config = without_router(config)
    plan = plan_here(config, base_dir, known_ports=ports, pins=pins)
    return plan if tinker else replace(plan, tinker=None)


def without_router(config: FleetConfig) -> FleetConfig:
    """The configuration that `up --no-router` brings up."""
    return config.model_copy(update={"router": RouterSection(enabled=False)})


def came_up_with_router(applied: Sequence[FleetConfig], digest: str, replicas: int = 0) -> bool:
    """Whether the fleet of this config digest came up with the router of its file, one of those
    that were `applied` last, and not by `up --no-router`. It may have been scaled to `replicas`.
    """
    candidates = list(applied)
    for config in applied:
        with suppress(UsageError):  # it cannot have been
            candidates.append(scaled(config, replicas))
    return any(config_digest(config) == digest for config in candidates) or not any(
        config_digest(without_router(config)) == digest for config in candidates
    )


def scaled(config: FleetConfig, replicas: int) -> FleetConfig:
    """The configuration with another number of replicas.

    Raises:
        UsageError: the fleet file lists replica groups, or too few ports; a fleet cannot have that
            many.
    """
    if replicas < 1:
        raise UsageError(f"cannot scale to {replicas}", hint="to stop the fleet: skyctl down")
    if replicas > MOST_REPLICAS:
        raise UsageError(f"cannot scale to {replicas}: a fleet has at most {MOST_REPLICAS}")
    if not isinstance(config.replicas, int):
        raise UsageError(
            f"fleet {config.name} has replica groups", hint="change their counts and: skyctl up"
        )
    ports = config.ports
    if config.scale is None and ports and len(ports) < replicas:
        raise UsageError(
            f"the fleet file names {len(ports)} ports for {replicas} replicas",
            hint="add to `ports`, or leave it out",
        )
    # with all ports: it may grow again
    return config.model_copy(update={"replicas": replicas})


def at_present(config: FleetConfig, ports: Mapping[str, int]) -> FleetConfig:
    """The configuration with as many replicas as run, by their ports, where load decides how many;
    within the file's bounds, by which it also begins.
    """
    if (scale := config.scale) is None:
        return config
    written = config.replicas if isinstance(config.replicas, int) else scale.min
    count = len(servers_of(ports)) or written
    return config.model_copy(update={"replicas": min(max(count, scale.min), scale.max)})


def usable(
    plan: FleetPlan, ports: Mapping[str, int], source: YamlSource | None = None
) -> FleetPlan:
    """The plan itself, once checked against this machine.

    Raises:
        UsageError: everything that is wrong; `ports` are held by this fleet's own processes.
    """
    problems = check_plan(plan, own_ports=ports.values(), source=source)
    if problems:
        raise UsageError(
            "; ".join(problem.message for problem in problems),
            hint=next((problem.hint for problem in problems if problem.hint), ""),
            details={"problems": [problem.to_json() for problem in problems]},
        )
    return plan


def ports_of(plan: FleetPlan) -> dict[str, int]:
    """Every port of a plan by name; the router has two, and a server on several machines. 0 where
    one is chosen only when its server starts.
    """
    ports = {spec.name: spec.port for spec in plan.servers}
    masters = {spec.name: spec.master_port for spec in plan.servers if spec.master_port}
    ports |= {master_of(name): port for name, port in masters.items()}
    if plan.router is not None:
        ports |= {"router": plan.router.port, "router-metrics": plan.router.metrics_port}
    if plan.tinker is not None:
        ports["tinker"] = plan.tinker.port
    return ports


def servers_of(ports: Iterable[str]) -> set[str]:
    """The servers among those that have a port."""
    named = set(ports) - {"router", "router-metrics", "tinker"}
    return named - {master_of(name) for name in named}


def living(ports: Mapping[str, int], rows: Iterable[ProcessRow]) -> dict[str, int]:
    """The ports without those of dead processes, which may have been taken since. A server that may
    still run on another machine keeps its own.
    """
    named = {row.name for row in rows if row.alive() or begun(row.token)}
    named |= {"router-metrics"} if "router" in named else set()
    named |= {master_of(name) for name in named}
    return {name: port for name, port in ports.items() if name in named}
