"""The verbs that only commands on the supervisor's own machine may use: a plan names programs to
run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from skyctl.core.handlers import handlers
from skyctl.core.plan import FleetPlan
from skyctl.core.service import FleetService
from skyctl.core.status import OperationKind
from skyctl.core.verb_table import Handlers, Verb, by_verb, handle
from skyctl.supervisor.client import RemoteFleet
from skyctl.supervisor.reconcile import Preview
from skyctl.supervisor.wire import adapter

_UNDO_S = 120.0


@dataclass(frozen=True)
class Reconcile:
    """Bring the fleet to a plan."""

    plan: FleetPlan
    """What is to run."""
    kind: OperationKind = OperationKind.UP
    """The operation's name."""
    parallel: int = 1
    """So many servers are restarted at a time."""
    undo: bool = True
    """Those that do not come back get their old settings again."""
    request_id: str = ""
    """What `Undo` names."""


@dataclass(frozen=True)
class Undo:
    """Undo what this request began, if nothing else was begun since."""

    request_id: str


@dataclass(frozen=True)
class Adopt:
    """Adopt what runs, as it is; the plan says how dead processes are restarted."""

    plan: FleetPlan


@dataclass(frozen=True)
class Begun:
    """An operation's number. 0: there was nothing to do. `joined`: another command began it."""

    operation: int
    joined: bool = False


RECONCILE: Final[Verb[Reconcile, Begun]] = Verb("reconcile", Reconcile)
PREVIEW: Final[Verb[Reconcile, Preview]] = Verb("preview", Reconcile)
ADOPT: Final[Verb[Adopt, int]] = Verb("adopt", Adopt)
UNDO: Final[Verb[Undo, None]] = Verb("undo", Undo, lambda request: _UNDO_S)


class SupervisorService(FleetService):
    """A FleetService that owns its processes."""

    async def reconcile(self, request: Reconcile) -> Begun:
        """Begin to bring the fleet to a plan.

        A second `up` with the same plan joins the first. Raises ConflictError when busy.
        """
        return await self._ask(RECONCILE, request, Begun)

    async def preview(self, request: Reconcile) -> Preview:
        """What `reconcile` would do."""
        return await self._ask(PREVIEW, request, Preview)

    async def adopt(self, request: Adopt) -> int:
        """Begin to adopt what runs without a supervisor; returns the operation's number."""
        return await self._ask(ADOPT, request, int)

    async def undo(self, request: Undo) -> None:
        """Stop the operation of a request and what it started; the whole fleet if that leaves
        nothing. A request that has not come yet is refused.
        """
        return await self._ask(UNDO, request, type(None))


def own_handlers(fleet: SupervisorService) -> Handlers:
    """What answers each verb of a supervisor's own machine."""
    return handlers(fleet) | by_verb(
        handle(RECONCILE, fleet.reconcile),
        handle(PREVIEW, fleet.preview),
        handle(ADOPT, fleet.adopt),
        handle(UNDO, fleet.undo),
    )


class SupervisorClient(RemoteFleet, SupervisorService):
    """A supervisor on this machine, as seen by the process that starts it."""

    def _encoded(self, request: object) -> bytes:
        # keys left out of a fleet file stay left out on the other side; its warnings are for the
        # user
        if isinstance(request, Reconcile | Adopt):
            request = replace(request, plan=replace(request.plan, warnings=()))
            return adapter(type(request)).dump_json(request, exclude_unset=True)
        return super()._encoded(request)
