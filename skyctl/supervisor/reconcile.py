"""The difference between a plan and the running replicas. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyctl.core.plan import FleetPlan
from skyctl.supervisor.wire import spec_hash


@dataclass(frozen=True)
class Changes:
    """What has to be done with replicas, by name in the plan's order, and with fronts."""

    start: tuple[str, ...] = ()
    """Replicas of the plan that do not run."""
    restart: tuple[str, ...] = ()
    """Those that run with other settings."""
    stop: tuple[str, ...] = ()
    """Those that run and are not in the plan."""
    router: bool = False
    """Whether the router changes."""
    tinker: bool = False
    """Whether the Tinker API changes."""

    def __bool__(self) -> bool:
        return bool(self.start or self.restart or self.stop or self.router or self.tinker)

    def __str__(self) -> str:
        by_verb = {"start": self.start, "restart": self.restart, "stop": self.stop}
        parts = [f"{verb} {', '.join(names)}" for verb, names in by_verb.items() if names]
        fronts = [name for name in ("router", "tinker") if getattr(self, name)]
        return "; ".join(parts) or ", ".join(fronts) or "nothing to do"


def compare(
    plan: FleetPlan,
    running: Mapping[str, str | None],
    router: str | None,
    tinker: str | None = None,
) -> Changes:
    """What to do so that what runs becomes `plan`. A process is given by its spec's hash; None: it
    was given up or stopped, or (a front) there is none.
    """
    planned = {spec.name: spec_hash(spec) for spec in plan.servers}
    start, restart = [], []
    for name, digest in planned.items():
        current = running.get(name)
        if current is None:
            start.append(name)
        elif current != digest:
            restart.append(name)
    return Changes(
        start=tuple(start),
        restart=tuple(restart),
        stop=tuple(name for name in running if name not in planned),
        router=router != (spec_hash(plan.router) if plan.router else None),
        tinker=tinker != (spec_hash(plan.tinker) if plan.tinker else None),
    )
