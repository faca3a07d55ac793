"""A fleet that skyctl started on this machine, through its supervisor's unix socket."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skyctl.core import verb_table
from skyctl.core.handlers import handlers
from skyctl.core.registry import FleetRef, kept_files, supervisor_running
from skyctl.core.requests import JobQuery, Recover, StatusQuery
from skyctl.core.verb_table import Q, R, Verb
from skyctl.errors import (
    ConflictError,
    FleetDownError,
    FleetFileError,
    SkyctlError,
    VersionMismatch,
)
from skyctl.kill_points import reached
from skyctl.store.stopped import STOPPED_S
from skyctl.supervisor.client import RemoteFleet, by_socket, stopped_supervisor

if TYPE_CHECKING:
    from skyctl.core.findings import Finding
    from skyctl.core.recovery import Recovered
    from skyctl.core.status import FleetStatus
    from skyctl.fleetfile.schema import FleetConfig

# What is on record, and is answered without a supervisor: none is started for it but for a status.
_ON_RECORD = (
    verb_table.STATUS,
    verb_table.FINDINGS,
    verb_table.JOBS,
    verb_table.JOB_CHANGES,
    verb_table.CANCEL_JOB,
    verb_table.EVENTS,
    verb_table.WEIGHTS,
    verb_table.KEPT_VERSIONS,
    verb_table.FORGET_VERSION,
    verb_table.PROCESSES,
    verb_table.ADAPTERS,
    verb_table.LOGS,
)
_CONTROLS = (verb_table.PAUSE, verb_table.RESUME, verb_table.SLEEP, verb_table.WAKE)
_KILL_POINTS: dict[Verb[Any, Any], tuple[str, str]] = {
    verb_table.START_PUSH: ("sync.asked", "sync.begun"),
    verb_table.SCALE: ("scale.asked", ""),
    **dict.fromkeys(_CONTROLS, ("verb.asked", "verb.answered")),
}
_SUPERVISORS = 5  # who keeps ending will not be the one that puts it right
_SUCCESSOR_S = 30.0
_SUCCESSOR_POLL_S = 0.1
_STOPPED_S = 1.5 * STOPPED_S
"""How long a job is followed while the supervisor is stopped. A guardian would end that sooner, but
there is none where the job is over and could not be put on record.
"""


class SupervisedFleet(RemoteFleet):
    """Verbs start a supervisor for servers that were left without one.

    The state file is the supervisor's. It is read here only when no supervisor answers.
    """

    def __init__(self, ref: FleetRef) -> None:
        super().__init__(ref.name, by_socket(ref.paths), paths=ref.paths)
        self.ref = ref
        self._reviving = asyncio.Lock()
        self._revived = False
        self._stopped_since: float | None = None

    async def _ask(self, verb: Verb[Q, R], request: Q, result: type[R]) -> R:
        followed = isinstance(request, StatusQuery) and request.operation is not None
        on_record = verb in _ON_RECORD and not followed
        before, after = _KILL_POINTS.get(verb, ("", ""))
        try:
            if not followed and (verb is verb_table.STATUS or not on_record):
                await self._revive()
            reached(before)
            answer = await super()._ask(verb, request, result)
            reached(after)
            self._stopped_since, self._revived = None, False
        except FleetDownError as error:
            follows = isinstance(request, JobQuery) and request.wait_s > 0
            if not on_record or (follows and self._stopped_for_long(error)):
                raise
            answer = await self._on_record(verb, request, error)
        return answer

    def _stopped_for_long(self, error: FleetDownError) -> bool:
        """Whether requests have met a stopped supervisor for so long that none will end it."""
        now = time.monotonic()
        if "stopped" not in error.details:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        return self._stopped_since is not None and now - self._stopped_since > _STOPPED_S

    async def status(self, request: StatusQuery = StatusQuery()) -> FleetStatus:
        """Says too whether the fleet file differs from the one in force."""
        status = await super().status(request)
        if not status.config_digest:
            return status
        config = self.ref.loaded  # None: the file is the one in force
        return replace(status, unapplied=config is not None and self._differs(config, status))

    def _differs(self, config: FleetConfig, status: FleetStatus) -> bool:
        """Whether `up` with this file would change something, without its router if the fleet came
        up so.
        """
        from skyctl.core.plan import config_digest

        if config_digest(config) == status.config_digest:
            return False
        from skyctl.core.planning import came_up_with_router, without_router

        with suppress(FleetFileError):  # a file that was applied does not load any more
            applied = [ref.config for ref in kept_files(self.ref)]
            if not came_up_with_router(applied, status.config_digest):
                return config_digest(without_router(config)) != status.config_digest
        return True

    async def kept(self) -> tuple[dict[str, int], dict[str, str]]:
        """What a new plan of the fleet keeps: the ports of what runs, or of what a live supervisor
        is starting, by name; and what its models mean.
        """
        from skyctl.core.planning import living

        recorded = await self.processes()
        if supervisor_running(self.ref.paths):
            return recorded.ports, recorded.pins
        return living(recorded.ports, recorded.rows), recorded.pins

    async def _on_record(self, verb: Verb[Q, R], request: Q, error: FleetDownError) -> Any:
        from skyctl.core.results import Processes
        from skyctl.core.status import FleetStatus, Health
        from skyctl.service.unsupervised import UnsupervisedFleet
        from skyctl.store.state import FleetState

        if not self.ref.paths.database.exists():  # it was never started
            if verb is verb_table.STATUS:
                return FleetStatus(self.name, Health.DOWN, (), None, supervised=False)
            if verb is verb_table.PROCESSES:
                return Processes()
            if verb in (verb_table.FINDINGS, verb_table.EVENTS, verb_table.KEPT_VERSIONS):
                return ()
            raise error
        with FleetState(self.ref.paths.database) as state:
            fleet = UnsupervisedFleet(self.ref, state, error.message)
            return await handlers(fleet)[verb].answer(request)

    async def _revive(self) -> None:
        """Start a supervisor for servers that were left without one: once, until one has answered.

        Raises:
            FleetDownError: it cannot be started.
        """
        async with self._reviving:
            if not self._revived and not supervisor_running(self.ref.paths):
                self._revived = True
                await self._with_another()

    async def _with_another(self) -> None:
        from skyctl.service.revive import revive

        try:
            await revive(self.ref)
        except SkyctlError as error:
            raise FleetDownError(
                f"the supervisor of fleet {self.ref.name} is gone, and no other can take its "
                f"place: {error.message}",
                hint=error.hint or "take the servers over: skyctl up; or stop them: skyctl down",
            ) from error

    async def findings(self) -> tuple[Finding, ...]:
        """What is the matter with each server, and which processes are stopped; nothing is started
        for it.
        """
        from skyctl.core.diagnosis import stopped
        from skyctl.core.findings import Action, Condition, Finding
        from skyctl.service.revive import stopped_holders

        findings = [
            stopped(holder) for holder in await asyncio.to_thread(stopped_holders, self.ref.paths)
        ]
        if pid := await asyncio.to_thread(stopped_supervisor, self.ref.paths):
            findings.append(
                Finding("supervisor", Condition.STOPPED, f"pid {pid} is stopped", Action.END)
            )
        try:
            return (*findings, *await super().findings())
        except VersionMismatch as error:
            return (Finding("supervisor", Condition.OTHER_VERSION, error.message, Action.REPLACE),)

    async def recover(self, request: Recover = Recover()) -> tuple[Recovered, ...]:
        """With a supervisor of this version, started if need be."""
        from skyctl.core.recovery import Recovered
        from skyctl.service.revive import end_stopped_processes
        from skyctl.store.in_doubt import close_orphans
        from skyctl.store.state import FleetState

        began = time.monotonic()
        before = await self.findings()
        await end_stopped_processes(self.ref.paths)
        if not supervisor_running(self.ref.paths) and self.ref.paths.database.exists():
            # before anything slow: a follower of a job learns at once that its process is dead
            with FleetState(self.ref.paths.database) as state:
                close_orphans(state)
            before = await self.findings()  # with what a dead push left
        done = await self._recovered(request)
        after = {finding.server: finding for finding in await self.findings()}
        seconds = time.monotonic() - began

        def report(finding: Finding) -> Recovered:
            """Of a server that recovery itself had nothing to do about: was taking over enough?"""
            if not finding.action.needed:
                return Recovered(
                    finding.server, finding.condition, finding.action, True, finding.explained
                )
            now = after.get(finding.server)
            ok = now is None or not now.action.needed
            detail = "" if now is None or ok else now.detail
            return Recovered(finding.server, finding.condition, finding.action, ok, detail, seconds)

        return tuple(done.get(finding.server) or report(finding) for finding in before)

    async def _recovered(self, request: Recover) -> dict[str, Recovered]:
        """What was done, by server; nothing where no server lives.

        A supervisor that dies meanwhile is replaced once more: its servers live on.
        """
        from skyctl.service.bring_down import after_down, end_leftovers
        from skyctl.service.revive import replace_other, revive

        for _ in range(_SUPERVISORS):
            await replace_other(self.ref)
            await revive(self.ref)
            if not supervisor_running(self.ref.paths):
                if await end_leftovers(self.ref):
                    return {}
                continue
            try:
                rows = await super().recover(request)
                return {row.server: row for row in rows if row.action.needed}
            except ConflictError as error:
                if error.details.get("operation") != "down":
                    raise
                await after_down(self.ref)
            except FleetDownError:
                await self._successor()
        raise SkyctlError(
            f"the supervisor of fleet {self.ref.name} ended {_SUPERVISORS} times meanwhile",
            hint=f"its log says why: {self.ref.paths.supervisor_log}",
        )

    async def _successor(self) -> None:
        """Wait until the supervisor that did not answer is gone, or has a plan."""
        from skyctl.core.urls import FleetUrls

        until = time.monotonic() + _SUCCESSOR_S
        while supervisor_running(self.ref.paths) and time.monotonic() < until:
            await asyncio.sleep(_SUCCESSOR_POLL_S)
            try:
                await RemoteFleet._ask(self, verb_table.URLS, None, FleetUrls)
                return
            except FleetDownError:
                continue
