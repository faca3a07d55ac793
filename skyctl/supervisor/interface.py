"""What only the commands of a supervisor's own machine may ask it: a plan names programs to run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skyctl.core.plan import FleetPlan
from skyctl.core.service import FleetService
from skyctl.supervisor.client import RemoteFleet
from skyctl.supervisor.wire import adapter

_UNDO_S = 120.0


@dataclass(frozen=True)
class Reconcile:
    """Make the fleet what the plan says; `kind` is what the operation is called."""

    plan: FleetPlan
    kind: str = "up"


@dataclass(frozen=True)
class Adopt:
    """Take over what runs, as it is; the plan says how the dead are started again."""

    plan: FleetPlan


@dataclass(frozen=True)
class Begun:
    """An operation. 0: there was nothing to do. `joined`: somebody else began it."""

    operation: int
    joined: bool = False


class SupervisorService(FleetService):
    """A FleetService that owns its processes."""

    async def reconcile(self, asked: Reconcile) -> Begun:
        """Begin to make the fleet what a plan says.

        A second `up` with the same plan joins the first. Raises ConflictError when busy.
        """
        return await self._ask("reconcile", asked, Begun)

    async def adopt(self, asked: Adopt) -> int:
        """Begin to take over what runs without a supervisor; the operation's number."""
        return await self._ask("adopt", asked, int)

    async def undo(self) -> None:
        """Stop the operation in progress and what it started; the whole fleet if that is all."""
        return await self._ask("undo", None, type(None), patience_s=_UNDO_S)


class SupervisorClient(RemoteFleet, SupervisorService):
    """A supervisor of this machine, for whoever starts it."""

    def _encoded(self, asked: object) -> bytes:
        # what a fleet file left out is still left out over there; its warnings are for the user
        if isinstance(asked, Reconcile | Adopt):
            asked = replace(asked, plan=replace(asked.plan, warnings=()))
            return adapter(type(asked)).dump_json(asked, exclude_unset=True)
        return super()._encoded(asked)
