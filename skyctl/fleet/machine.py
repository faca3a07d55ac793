"""Planning for the machine we are on: the pure planner, given what is really here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from skyctl.fleet.devices import discover_cpus, discover_gpus
from skyctl.fleet.plan import FleetPlan, plan_fleet
from skyctl.fleet.ports import free_port
from skyctl.fleet.schema import FleetConfig


def plan_here(
    config: FleetConfig,
    base_dir: Path,
    *,
    known_ports: Mapping[str, int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> FleetPlan:
    """`plan_fleet` with this machine's GPUs, CPU cores and free ports.

    Raises:
        UsageError: as `plan_fleet`.
    """
    return plan_fleet(
        config,
        base_dir,
        gpus=[] if config.device == "cpu" else discover_gpus(),
        cpus=discover_cpus(),
        next_port=lambda: free_port("127.0.0.1"),
        environ=environ,
        known_ports=known_ports,
    )
