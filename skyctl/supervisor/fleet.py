"""What a supervisor keeps running: replicas and fronts, the work in progress on them, and which are
routed to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skyctl.core.health import FROZEN, routable
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.recorded import RecordedFleet, down_error
from skyctl.core.recovery import Recovered
from skyctl.core.status import Operation
from skyctl.errors import NotFoundError
from skyctl.http.client import ControlClient
from skyctl.store.journal import Job
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.front import Front
from skyctl.supervisor.reconcile import Changes, Running, compare
from skyctl.supervisor.replica import Replica, ReplicaContext
from skyctl.supervisor.router import RouterChild
from skyctl.supervisor.tinker import TinkerChild

_GIVEN_UP = ("failed", "dead", "stopped")


class RunningFleet(RecordedFleet):
    """Belongs to one event loop. `push_job` is the push under way; `recovered` is the outcome of
    the last recovery; `taken_over`: what was alive has been adopted and repaired, the rest may
    still be starting.
    """

    def __init__(
        self, paths: FleetPaths, state: FleetState, client: ControlClient | None = None
    ) -> None:
        super().__init__(paths, state)
        self.client = client or ControlClient()
        self.plan: FleetPlan | None = None
        self.replicas: dict[str, Replica] = {}
        self.router: RouterChild | None = None
        self.tinker: TinkerChild | None = None
        self.held_out: set[str] = set()  # kept out of the router while something is done to them
        self.verbs_under_way = 0
        self.draining = False
        self.operation: Operation | None = None
        self.started_by_operation: list[str] = []
        self.push_job: Job | None = None
        self.recovered: tuple[Recovered, ...] = ()
        self.taken_over = False
        self.not_listening = ""  # why other machines cannot reach it although they should
        self._context: ReplicaContext | None = None
        self._looking = False

    def require_plan(self) -> FleetPlan:
        """The plan of the running fleet. Raises FleetDownError if none was started yet."""
        if self.plan is None:
            raise down_error(self.paths.name)
        return self.plan

    def named(self, names: Sequence[str]) -> list[Replica]:
        """Replicas by name, all if empty. Raises NotFoundError for an unknown one."""
        self.require_plan()
        for name in names:
            if name not in self.replicas:
                raise NotFoundError(
                    f"fleet {self.paths.name} has no replica {name!r}",
                    hint=f"its replicas are: {', '.join(self.replicas)}",
                )
        return [self.replicas[n] for n in names] if names else list(self.replicas.values())

    def changes(self, plan: FleetPlan) -> Changes:
        """What a plan would change."""
        running = {
            r.name: Running(r.running_hash, r.phase in _GIVEN_UP) for r in self.replicas.values()
        }
        return compare(plan, running, _running(self.router), _running(self.tinker))

    def new_replica(self, spec: ServerSpec) -> Replica:
        """A replica of this fleet, not started yet."""
        assert self._context is not None  # made with the first plan
        self.replicas[spec.name] = replica = Replica(spec, self._context)
        return replica

    def desired(self) -> dict[str, str]:
        """URLs the router should route to, by server name."""
        if self.draining:
            return {}
        # a server being admitted is shown as updating but is not frozen: until its push begins it
        # answers with the weights it was started from
        states = {
            name: replica.state
            for name, replica in self.replicas.items()
            if name not in self.held_out and replica.phase != "admitting"
        }
        by_role: dict[str, dict[str, str]] = {}
        for name, state in states.items():
            by_role.setdefault(self.replicas[name].spec.role, {})[name] = state
        names = set().union(*map(routable, by_role.values()))
        if self.verbs_under_way:
            # servers that freeze or thaw before the others are no reason to restart a router of
            # prefill/decode pairs, which cuts requests
            names |= {n for n, s in states.items() if s in FROZEN and self.replicas[n].spec.role}
        return {name: self.replicas[name].spec.url for name in sorted(names)}

    def routed(self) -> dict[str, str]:
        """The same for clients that go through the router, if there is one: none until it is up."""
        return self.desired() if self.router is None or self.router.state == "ready" else {}

    def wake_tinker(self) -> None:
        """Wake the Tinker API: it may be waiting for a server, or for the router."""
        if self.tinker is not None and self.tinker.state == "waiting":
            self.tinker.wake()

    def changed(self) -> None:
        """Some replica's state changed: all are looked at soon, once for any number of changes."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        for replica in self.replicas.values():
            replica.note_state()
        if self.router is not None:
            self.router.wake()
        self.wake_tinker()


def _running(front: Front | None) -> Running | None:
    return Running(front.running_hash, front.phase in _GIVEN_UP) if front else None
