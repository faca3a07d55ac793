"""Planning for the machine we are on (or for none): the pure planner and what it needs to know."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

from skyctl.core.plan import FleetPlan, plan_fleet
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch import HOSTS


def plan_here(
    config: FleetConfig,
    base_dir: Path,
    *,
    known_ports: Mapping[str, int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> FleetPlan:
    """`plan_fleet` with the GPUs, CPU cores and free ports of its machine.

    Raises:
        UsageError: as `plan_fleet`.
    """
    host = HOSTS[config.launcher]
    return plan_fleet(
        config,
        base_dir,
        gpus=[] if config.device == "cpu" else host.gpus(),
        cpus=host.cpus(),
        next_port=lambda: host.free_port("127.0.0.1"),
        environ=environ,
        known_ports=known_ports,
    )


def plan_offline(config: FleetConfig, base_dir: Path) -> FleetPlan:
    """`plan_fleet` without a look at the machine: ports and keys are made up, GPUs are not known.

    Raises:
        UsageError: as `plan_fleet`, but for an API key that is not set.
    """
    if config.device == "auto" and config.weight_transfer.transport in ("nccl", "ipc"):
        config = config.model_copy(update={"device": "cuda"})  # it is meant for such a machine
    environ = {} if config.api_key_env is None else {config.api_key_env: "not looked up"}
    ports = itertools.count(20000)
    return plan_fleet(config, base_dir, gpus=[], next_port=lambda: next(ports), environ=environ)
