"""Plans of fleets, for machines that a test describes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyctl.core.check import check_plan
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.planner import plan_fleet
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.base import Cpu, Gpu
from skyctl.launch.local.host import free_port

PYTHON = "/usr/bin/python3"


def gpus(count: int) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index:04}", "H100", 80 * 1024**3) for index in range(count)]


def plan(
    base_dir: Path = Path("/nowhere"),
    *,
    machine_gpus: Sequence[Gpu] = (),
    environ: Mapping[str, str] | None = None,
    cpus: int = 0,
    known_ports: Mapping[str, int] | None = None,
    **config: Any,
) -> FleetPlan:
    ports = itertools.count(20000)
    return plan_fleet(
        FleetConfig.model_validate({"name": "demo", "model": "org/model", **config}),
        base_dir,
        gpus=machine_gpus,
        next_port=lambda: next(ports),
        environ=environ or {},
        cpus=[Cpu(index, index) for index in range(cpus)],
        known_ports=known_ports,
        python=PYTHON,
    )


def with_checkpoint(directory: Path) -> Path:
    """The directory, with the model of `plan` in it."""
    checkpoint = directory / "checkpoints/a"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    return directory


def local_plan(base_dir: Path, python: str, *, on: Sequence[Gpu] = (), **config: Any) -> FleetPlan:
    document = {"name": "f", "model": "./checkpoints/a", "python": python, **config}
    return plan_fleet(
        FleetConfig.model_validate(document),
        base_dir,
        gpus=on,
        next_port=lambda: free_port("127.0.0.1"),
        environ={},
    )


def problems(planned: FleetPlan, found: Sequence[Gpu] = ()) -> list[str]:
    return [problem.message for problem in check_plan(planned, discover=lambda: found)]


def value_of(server: ServerSpec, flag: str) -> str:
    return server.argv[server.argv.index(flag) + 1]
