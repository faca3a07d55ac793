"""The difference between a plan and the running replicas. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyctl.core.plan import FleetPlan, FrontSpec
from skyctl.supervisor.wire import spec_hash


@dataclass(frozen=True)
class Running:
    """One process as it is: its spec's hash, and whether it was given up or stopped."""

    spec_hash: str
    given_up: bool = False


@dataclass(frozen=True)
class Changes:
    """Names of replicas, in the plan's order, by what has to be done with them."""

    start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    router: bool = False
    tinker: bool = False

    def __bool__(self) -> bool:
        return bool(self.start or self.restart or self.stop or self.router or self.tinker)

    def __str__(self) -> str:
        parts = [
            f"{verb} {', '.join(names)}"
            for verb, names in (
                ("start", self.start),
                ("restart", self.restart),
                ("stop", self.stop),
            )
            if names
        ]
        fronts = [name for name in ("router", "tinker") if getattr(self, name)]
        return "; ".join(parts) or ", ".join(fronts) or "nothing to do"


def compare(
    plan: FleetPlan,
    running: Mapping[str, Running],
    router: Running | None,
    tinker: Running | None = None,
) -> Changes:
    """What to do so that `running` becomes `plan`."""
    wanted = {spec.name: spec_hash(spec) for spec in plan.servers}
    start, restart = [], []
    for name, digest in wanted.items():
        found = running.get(name)
        if found is None or found.given_up:
            start.append(name)
        elif found.spec_hash != digest:
            restart.append(name)
    return Changes(
        start=tuple(start),
        restart=tuple(restart),
        stop=tuple(name for name in running if name not in wanted),
        router=_differs(plan.router, router),
        tinker=_differs(plan.tinker, tinker),
    )


def _differs(wanted: FrontSpec | None, found: Running | None) -> bool:
    runs = found.spec_hash if found is not None and not found.given_up else None
    return runs != (wanted and spec_hash(wanted))
