"""From a fleet's reference to a plan for this machine, with the ports its replicas already have."""

from __future__ import annotations

import json
from dataclasses import replace

from skyctl.core.check import check_plan
from skyctl.core.machine import plan_here
from skyctl.core.plan import FleetPlan
from skyctl.core.registry import FleetRef, supervisor_running
from skyctl.errors import UsageError
from skyctl.store.state import FleetState


def planned(ref: FleetRef, *, router: bool = True) -> FleetPlan:
    """The plan of a fleet; what runs already keeps its ports. `router` False plans none."""
    plan = plan_here(ref.config, ref.base_dir, known_ports=_known_ports(ref))
    return plan if router else replace(plan, router=None)


def scaled(ref: FleetRef, replicas: int) -> FleetPlan:
    """The plan with another number of replicas.

    Raises:
        UsageError: the fleet file lists replica groups.
    """
    if not isinstance(ref.config.replicas, int):
        raise UsageError(
            f"fleet {ref.name} has replica groups", hint="change their counts and: skyctl up"
        )
    ports = ref.config.ports
    changes = {"replicas": replicas, "ports": ports[:replicas] if ports else None}
    if ports and len(ports) < replicas:
        raise UsageError(
            f"the fleet file names {len(ports)} ports for {replicas} replicas",
            hint="add to `ports`, or leave it out",
        )
    return planned(replace(ref, config=ref.config.model_copy(update=changes)))


def usable(ref: FleetRef, plan: FleetPlan) -> FleetPlan:
    """The plan itself, once it was checked against this machine.

    Raises:
        UsageError: what is wrong, all of it; ports held by this fleet's own processes are not.
    """
    found = check_plan(plan, own_ports=_known_ports(ref).values(), file=ref.file)
    if found:
        raise UsageError(
            "; ".join(problem.message for problem in found),
            hint=next((problem.hint for problem in found if problem.hint), ""),
            details={"problems": [problem.to_json() for problem in found]},
        )
    return plan


def _known_ports(ref: FleetRef) -> dict[str, int]:
    """Ports of a fleet that runs, or that a live supervisor is starting.

    Without a supervisor, ports of dead processes do not count: they may have been taken since.
    """
    if not ref.paths.database.exists():
        return {}
    with FleetState(ref.paths.database) as state:
        planned_ports: dict[str, int] = json.loads(state.get("ports") or "{}")
        alive = {r.name for r in state.processes() if r.alive()}
    if supervisor_running(ref.paths):
        return planned_ports
    if "router" in alive:
        alive.add("router-metrics")
    return {name: port for name, port in planned_ports.items() if name in alive}
