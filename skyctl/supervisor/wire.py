"""A FleetPlan as JSON, for the unix socket only: a server's environment may hold secrets."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import skyctl
from skyctl import __version__
from skyctl.core.plan import FleetPlan, RouterSpec, ServerSpec
from skyctl.engines import ENGINES
from skyctl.engines.base import Device
from skyctl.errors import VersionMismatch
from skyctl.fleetfile.schema import FleetConfig

PROTOCOL = 8
"""Of the supervisor's API. Count it up with every change that the other side has to know of."""

VERSION_HEADER = "x-skyctl"
"""On every request and answer: `version/protocol`, and on answers `/stamp` after it."""
CALLER_HEADER = "x-skyctl-caller"
"""Which command asks, percent-encoded: others are told of it."""


def spoken() -> str:
    """What this skyctl speaks, as in the header: `0.3.0/3`."""
    return f"{__version__}/{PROTOCOL}"


@cache
def stamp() -> str:
    """Changes when skyctl's files do: a supervisor goes on with those it was started from."""
    package = Path(skyctl.__file__).parent
    return f"{max(path.stat().st_mtime_ns for path in package.rglob('*.py')):x}"


def plan_to_json(plan: FleetPlan) -> dict[str, Any]:
    """Everything the supervisor needs to run the plan. Never write it to disk or a log."""
    return {
        "name": plan.name,
        "device": plan.device,
        "model_path": plan.model_path,
        "served_model_name": plan.served_model_name,
        "servers": [asdict(server) for server in plan.servers],
        "router": asdict(plan.router) if plan.router else None,
        "config": plan.config.model_dump(mode="json", exclude_unset=True),
        "base_dir": str(plan.base_dir),
        "python": plan.python,
        "free_gpus": list(plan.free_gpus),
    }


def plan_from_json(data: dict[str, Any]) -> FleetPlan:
    """The inverse of `plan_to_json`.

    Raises:
        pydantic.ValidationError: it is no plan.
    """
    return FleetPlan(**dict(_Plan.model_validate(data)))


class _Plan(BaseModel):
    """What `plan_to_json` writes."""

    model_config = ConfigDict(extra="forbid")

    name: str
    device: Device
    model_path: str
    served_model_name: str
    servers: tuple[ServerSpec, ...]
    router: RouterSpec | None
    config: FleetConfig
    base_dir: Path
    python: str
    free_gpus: tuple[int, ...]


def spec_hash(spec: ServerSpec | RouterSpec) -> str:
    """Changes whenever a process would have to be started anew to match the plan."""
    placement = ENGINES[spec.engine].placement_variables if isinstance(spec, ServerSpec) else ()
    env = sorted(item for item in spec.env.items() if item[0] not in placement)
    material = json.dumps([list(spec.argv), env])
    return hashlib.sha256(material.encode()).hexdigest()


def version_mismatch(supervisor: str, command: str) -> VersionMismatch:
    """The error of a command whose supervisor is of another skyctl; both as in the header."""
    return VersionMismatch(
        f"the supervisor of this fleet is of another skyctl ({supervisor or 'an old one'}) than "
        f"this command ({command})",
        hint="put one of this version in its place, the servers go on: skyctl recover",
    )
