"""Plans for fleets over several machines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.planner import plan_fleet
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.base import Cpu, Gpu, Machine, Node

SPAN = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nodes_per_replica": 2}


def machine(name: str, gpus: int) -> Machine:
    ports = itertools.count(21000)
    return Machine(
        Node(f"me@{name}", f"10.0.0.{ord(name)}", "/env/python", ("ssh",), 60.0),
        tuple(Gpu(index, f"GPU-{index}", "H100", 80 * 1024**3) for index in range(gpus)),
        tuple(Cpu(index, index) for index in range(4)),
        lambda: next(ports),
        "eth0",
    )


def plan(
    gpus: dict[str, int], known_ports: Mapping[str, int] | None = None, **config: Any
) -> FleetPlan:
    ssh = {"hosts": [f"me@{name}" for name in gpus]}
    written = {"name": "f", "model": "org/m", "launcher": "ssh", "ssh": ssh, **SPAN, **config}
    ports = itertools.count(20000)
    return plan_fleet(
        FleetConfig.model_validate(written),
        Path("/nowhere"),
        gpus=[],
        next_port=lambda: next(ports),
        environ={},
        known_ports=known_ports,
        python="/usr/bin/python3",
        machines=[machine(name, count) for name, count in gpus.items()],
    )


def value_of(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def places(server: ServerSpec) -> list[tuple[str, tuple[int, ...]]]:
    parts = [(server.node, server.gpus), *((one.node, one.gpus) for one in server.followers)]
    return [(node.target[-1], gpus) for node, gpus in parts if node]
