"""One fleet of a group that shares its GPUs (`sleep_group:`): whether it may be awake, and how it
hands the GPUs over.

    refused: something starts, is pushed or recovered      nothing has changed
    ─► out of the router ─► requests end ─► asleep ─► the group names the next fleet
                                             └─ one does not sleep: the others wake again

While another fleet is named, no server here starts, wakes, restarts or takes weights. One that dies
waits, without a process, until this fleet is named again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from skyctl.core.requests import Outcomes, Sleep, Wake
from skyctl.core.status import FleetStatus, GroupStatus
from skyctl.errors import ConflictError, SkyctlError
from skyctl.kill_points import reached
from skyctl.states import Phase
from skyctl.store.in_doubt import in_doubt
from skyctl.store.sleep_groups import SleepGroup
from skyctl.supervisor import rollout
from skyctl.supervisor.fleet import RunningFleet

_WAITS = (Phase.ASLEEP, Phase.RESTARTING)
"""Phases of a server that loads nothing unless this fleet may be awake."""
_WAKE = "skyctl wake"
_Control = Callable[[Sleep | Wake], Awaitable[Outcomes]]


class Member:
    """This fleet in its group, if the file names one."""

    def __init__(self, running: RunningFleet) -> None:
        self._running = running
        self._handing_over = False

    @property
    def _group(self) -> SleepGroup | None:
        plan = self._running.plan
        name = plan.config.sleep_group if plan is not None else None
        return SleepGroup(self._running.paths.root, name) if name else None

    def asleep_because(self) -> str:
        """Why this fleet has to sleep; "" if it may be awake."""
        group = self._group
        if group is None:
            return ""
        if self._handing_over:
            return f"it hands its GPUs over in sleep_group {group.name}"
        try:
            awake = group.awake()
        except SkyctlError as error:
            return error.message
        if awake == self._running.paths.name:
            return ""
        return f"{awake or 'no fleet'} is awake in sleep_group {group.name}"

    def require_awake(self) -> None:
        """Raise ConflictError if this fleet has to sleep."""
        if reason := self.asleep_because():
            name = self._running.paths.name
            raise ConflictError(f"fleet {name} sleeps: {reason}", hint=f"skyctl switch {name}")

    def shown(self, status: FleetStatus) -> FleetStatus:
        """The status with the group, and with what wakes a fleet of it."""
        group = self._group
        if group is None:
            return status
        reason, switch = self.asleep_because(), f"skyctl switch {status.name}"
        reasons = tuple(
            replace(finding, detail="; ".join(filter(None, (finding.detail, reason))), hint=switch)
            if finding.hint.startswith(_WAKE)
            else finding
            for finding in status.reasons
        )
        awake = None
        with contextlib.suppress(SkyctlError):  # the reasons say so
            awake = group.awake() or None
        sleep_group = GroupStatus(group.name, awake)
        return replace(status, sleep_group=sleep_group, reasons=reasons)

    async def hand_over(self, request: Sleep, control: _Control) -> Outcomes:
        """Put every server to sleep, and then name the fleet that may wake. The caller has the
        fleet's turn.

        Raises:
            ConflictError: this fleet is not in that group, may not be awake itself, is not at rest,
                or goes down.
            SkyctlError: a server did not sleep; those that did are awake again.
        """
        running, group = self._running, self._group
        if group is None or group.name != request.sleep_group:
            raise ConflictError(
                f"fleet {running.paths.name} is not in sleep_group {request.sleep_group}",
                hint=f"look: skyctl ls; then: skyctl switch {request.hands_to}",
            )
        self.require_awake()
        self._refuse_unrest()
        self._handing_over = True  # what is restarted now waits
        up = [replica for replica in running.replicas.values() if replica.phase is Phase.UP]
        running.held_out |= {replica.name for replica in up}
        try:
            reached("switch.sleeping")
            await rollout.sync_router(running)
            await rollout.drain_all(running, up, request.drain_timeout_s)
            outcomes = await self._put_to_sleep(group, request, control)
        finally:
            self._handing_over = False
            running.held_out -= {replica.name for replica in up}
            running.changed()
        running.state.add_event("fleet", f"sleeps: {request.hands_to} has its GPUs")
        return outcomes

    async def _put_to_sleep(
        self,
        group: SleepGroup,
        request: Sleep,
        control: _Control,
    ) -> Outcomes:
        running, replicas = self._running, self._running.replicas
        awake = tuple(name for name, replica in replicas.items() if not replica.row.sleep_level)
        try:
            outcomes = await control(request)
            self._require_asleep(outcomes)
            with running.state.durable():  # no supervisor after this one may route them
                for name in awake:  # one that has died comes back as the others do
                    replicas[name].update_row(sleep_level=request.level)
            reached("switch.asleep")
            group.give(request.hands_to)
        except SkyctlError:
            if awake and not running.draining:
                await control(Wake(servers=awake, timeout_s=request.timeout_s))
            raise
        reached("switch.given")
        return outcomes

    def _require_asleep(self, outcomes: Outcomes) -> None:
        running = self._running
        if running.draining:
            name = running.paths.name
            raise ConflictError(
                f"fleet {name} is going down",
                hint=f"wait for it: skyctl down --fleet {name}",
                details={"operation": "down"},
            )
        asleep = {outcome.server for outcome in outcomes if outcome.ok}
        problems = [
            f"{outcome.server}: {outcome.detail}"
            for outcome in outcomes
            if outcome.server not in asleep and running.replicas[outcome.server].has_memory
        ]
        if problems:
            name = running.paths.name
            raise SkyctlError(
                f"fleet {name} stays awake, a server does not sleep: {'; '.join(problems)}",
                hint=f"look: skyctl status --fleet {name}",
            )

    def _refuse_unrest(self) -> None:
        running = self._running
        name = running.paths.name
        for replica in running.replicas.values():
            waits = replica.phase in _WAITS or replica.phase.ended
            if replica.phase is not Phase.UP and (replica.has_memory or not waits):
                raise ConflictError(
                    f"{replica.name} of fleet {name} is {replica.state}",
                    hint=f"wait for it: skyctl wait --fleet {name}; or: skyctl down --fleet {name}",
                )
        if doubted := ", ".join(in_doubt(running.state)):
            raise ConflictError(
                f"a push into {doubted} of fleet {name} has not been put right",
                hint=f"first: skyctl recover --fleet {name}",
            )
