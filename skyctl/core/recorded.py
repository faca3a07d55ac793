"""Verbs answered from a fleet's state file, which are the same for every fleet."""

from __future__ import annotations

import asyncio
import json
import os.path
from pathlib import Path

from skyctl.core.arbiter import Act, Arbiter
from skyctl.core.following import CHANGES_WAIT_S, JobChanges, job_changes
from skyctl.core.log_times import log_files, log_lines
from skyctl.core.requests import CancelJob, EventQuery, Forget, JobQuery, LogQuery, Staging
from skyctl.core.results import KeptVersion, Processes, WeightsState
from skyctl.core.service import FleetService
from skyctl.core.verb_table import Q, R, Verb
from skyctl.errors import ConflictError, FleetDownError, NotFoundError
from skyctl.store.adapters import AdapterVersion, served
from skyctl.store.journal import Job
from skyctl.store.kept_weights import forget, kept_weights
from skyctl.store.paths import FleetPaths
from skyctl.store.server_locks import ServerLocks
from skyctl.store.state import Event, FleetState


class RecordedFleet(FleetService):
    """Verbs that need servers raise FleetDownError here; subclasses with servers implement them."""

    state: FleetState

    def __init__(self, paths: FleetPaths, state: FleetState | None = None) -> None:
        self.paths = paths
        if state is not None:  # otherwise it is opened later
            self.state = state

    async def _ask(self, verb: Verb[Q, R], request: Q, result: type[R]) -> R:
        raise down_error(self.paths.name)

    @property
    def arbiter(self) -> Arbiter:
        """The arbiter of who may act on this fleet."""
        return Arbiter(self.state.locks, self.server_locks)

    @property
    def server_locks(self) -> ServerLocks:
        """The locks of the servers that this fleet shares with other fleets."""
        return ServerLocks(self.paths)

    async def jobs(self) -> tuple[Job, ...]:
        return tuple(self.state.journal.jobs())

    async def job_changes(self, request: JobQuery) -> JobChanges:
        if not request.wait_s:
            job = self.state.journal.job(request.job)
            events = self.state.journal.events(job.id, after=request.after)
            return JobChanges(job, tuple(events), job.ended)
        wait_s = min(request.wait_s, CHANGES_WAIT_S)
        return await job_changes(self.state, request.job, request.after, wait_s=wait_s)

    async def cancel_job(self, request: CancelJob) -> None:
        job = self.state.journal.job(request.job, in_full=False)
        if job.ended:
            return
        if not self.state.journal.owner_alive(job.id):
            raise FleetDownError(
                f"the process that ran {job.id} died",
                hint="put right what it left: skyctl recover",
            )
        raise ConflictError(
            f"{job.id} runs in another process, which alone can cancel it",
            hint="press Ctrl-C where it was started",
        )

    async def events(self, request: EventQuery = EventQuery()) -> tuple[Event, ...]:
        return tuple(self.state.events(request.limit, after=request.after, since=request.since))

    async def weights(self) -> WeightsState:
        return WeightsState(tuple(self.state.servers()), tuple(self.state.journal.pushes()))

    async def kept_versions(self) -> tuple[KeptVersion, ...]:
        used = self.state.checkpoints()
        return tuple(
            KeptVersion(kept, kept.checkpoint in used, os.path.isdir(kept.checkpoint))  # noqa: ASYNC240, PTH112
            for kept in kept_weights(self.state)
        )

    async def forget_version(self, request: Forget) -> int:
        from skyctl.checkpoints.keeping import delete_copy
        from skyctl.push.source import full_version

        versions = await self.kept_versions()
        version = full_version(request.version, (candidate.kept.version for candidate in versions))
        matching = [candidate for candidate in versions if candidate.kept.version == version]
        if not matching:
            names = ", ".join(candidate.kept.version for candidate in versions) or "none"
            raise NotFoundError(
                f"version {version} is not kept by fleet {self.paths.name}",
                hint=f"kept versions: {names}",
            )
        with self.arbiter.take(Act.PUSH, f"skyctl weights forget {version}"):
            if any(candidate.kept.checkpoint in self.state.checkpoints() for candidate in matching):
                raise ConflictError(
                    f"fleet {self.paths.name} runs {version}: a replica that restarts needs it",
                    hint="push another version first",
                )
            gone = forget(self.state, version)
            for weights in gone:
                await asyncio.to_thread(delete_copy, Path(weights.checkpoint), self.paths.kept)
        return sum(weights.bytes for weights in gone)

    async def adapters(self) -> tuple[AdapterVersion, ...]:
        return tuple(served(self.state).values())

    async def staging(self) -> Staging:
        needed = self.state.checkpoints()
        kept = frozenset(path for path in needed if path)
        paths = self.paths
        return Staging(paths.staging, kept, paths.adapters, in_memory=paths.shared is None)

    async def processes(self) -> Processes:
        return Processes(
            tuple(self.state.processes()),
            json.loads(self.state.get("ports") or "{}"),
            bool(self.state.get("going_down")),
            json.loads(self.state.get("pins") or "{}"),
        )

    async def logs(self, request: LogQuery = LogQuery()) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(await asyncio.to_thread(log_lines, path, request))
            for name, path in log_files(self.paths, request.names).items()
        }


def down_error(name: str) -> FleetDownError:
    """The error of every verb that needs a running fleet."""
    return FleetDownError(f"fleet {name} is not running", hint="start it: skyctl up")
