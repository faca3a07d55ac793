"""A started fleet whose supervisor is gone: what its state file records, and what still runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from skyctl.core.diagnosis import judge, judge_dead, unsupervised
from skyctl.core.findings import Action, Condition, Finding
from skyctl.core.observation import Observed, observe
from skyctl.core.plan import local_url
from skyctl.core.recorded import RecordedFleet
from skyctl.core.registry import FleetRef
from skyctl.core.requests import StatusQuery
from skyctl.core.status import (
    FleetStatus,
    FrontStatus,
    Health,
    ReplicaStatus,
    RouterStatus,
    RunningCanary,
    TinkerStatus,
)
from skyctl.core.urls import access, control_token
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.states import ReplicaState
from skyctl.store.identity import ProcessIdentity, boot_id
from skyctl.store.in_doubt import in_doubt_or_orphaned
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor.restarts import remembered

F = TypeVar("F", bound=FrontStatus)


class UnsupervisedFleet(RecordedFleet):
    """Nothing changes meanwhile, unless a supervisor takes over. `problem` is why none could, if it
    was tried.
    """

    def __init__(self, ref: FleetRef, state: FleetState, problem: str = "") -> None:
        super().__init__(ref.paths, state)
        self._ref, self._problem = ref, problem

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        """Servers that run on without a supervisor, or none."""
        state, processes = self.state, self.state.processes()
        replicas = tuple(_replica(state, row) for row in processes if row.role == "server")
        fronts = {row.role: row for row in processes if row.role != "server"}
        running = [row.name for row in processes if _alive(row)]
        reasons = unsupervised(
            running,
            going_down=bool(state.get("going_down")),
            stale=any(_stale(row) for row in processes),
            problem=self._problem,
        )
        return FleetStatus(
            name=self.paths.name,
            health=Health.DEGRADED if running else Health.DOWN,
            replicas=replicas if running else (),
            router=_front(RouterStatus, fronts.get("router")) if running else None,
            tinker=_front(TinkerStatus, fronts.get("tinker")) if running else None,
            reasons=reasons,
            supervised=False,
            weight_version=state.weights().version,
            canary=RunningCanary.recorded(state.canary()),
        )

    async def findings(self) -> tuple[Finding, ...]:
        """What is wrong with each server; live ones are asked."""
        state = self.state
        rows = [row for row in state.processes() if row.role == "server"]
        if state.get("going_down"):
            detail = "`skyctl down` was cut short"
            return tuple(
                Finding(row.name, Condition.HALF_DOWN, detail, Action.DOWN) for row in rows
            )
        seen = {
            observed.server: observed
            for observed in await self._observe([r for r in rows if r.alive()])
        }
        doubts = in_doubt_or_orphaned(state)
        unrecorded = not seen and bool(state.unrecorded_processes())
        findings = []
        for row in rows:
            if row.name not in seen:
                orphans = [orphan.pid for orphan in row.descendants if orphan.alive()]
                others_live = bool(seen) or unrecorded
                findings.append(
                    judge_dead(
                        row.name, stale=_stale(row), orphans=orphans, others_live=others_live
                    )
                )
                continue
            doubted, intended = doubts.get(row.name), state.server(row.name)
            weights = state.weights_of(row.name)
            finding = judge(seen[row.name], intended, doubted, weights, ours=True)
            if finding.condition is Condition.HEALTHY:
                detail = "it serves, and no supervisor watches it"
                finding = Finding(row.name, Condition.UNSUPERVISED, detail, Action.ADOPT)
            findings.append(finding)
        return tuple(findings)

    async def _observe(self, rows: Sequence[ProcessRow]) -> list[Observed]:
        key = control_token(access(self._ref.config, self.paths))
        engine = self._ref.config.engine
        targets = [
            ServerTarget(row.name, local_url(row.host, row.port), key, engine) for row in rows
        ]
        async with ControlClient() as client:
            return await observe(client, targets)


def _replica(state: FleetState, row: ProcessRow) -> ReplicaStatus:
    restarts, reason = remembered(state, row.name, time.time())
    return ReplicaStatus(
        name=row.name,
        gpus=row.gpus,
        weight_version=state.server(row.name).weight_version,
        restarts=len(restarts),
        restart_reason=reason,
        **_process(row),
    )


def _front(kind: type[F], row: ProcessRow | None) -> F | None:
    return None if row is None else kind(**_process(row))


def _process(row: ProcessRow) -> dict[str, Any]:
    """What servers and fronts have in common."""
    identity = _alive(row)
    return {
        "state": ReplicaState.UNSUPERVISED if identity else ReplicaState.STOPPED,
        "url": local_url(row.host, row.port),
        "pid": identity.pid if identity else None,
        "port": row.port,
        "uptime_s": time.time() - row.started_at if identity else None,
    }


def _stale(row: ProcessRow) -> bool:
    return row.identity is not None and row.identity.boot_id != boot_id()


def _alive(row: ProcessRow) -> ProcessIdentity | None:
    return row.identity if row.alive() else None
