"""The fleet's own copy of what a push has left only in servers' memory: written out of a server
while all serve. The next push waits for it; sleep, wake and recovery do not: it begins again after
them, and after the death of a supervisor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from skyctl.core.arbiter import Act
from skyctl.core.results import SavedWeights
from skyctl.core.saving import keep_weights, source_of, unsavable
from skyctl.errors import NotFoundError, PreflightError, ServerError, SkyctlError
from skyctl.states import Phase
from skyctl.store.journal import Job
from skyctl.supervisor.admission import reload_rows
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import Replica

_LOG = logging.getLogger(__name__)
_DUE = "copy_due"
"""In the fleet's state: the push whose weights are to be copied; "" if none are."""


class Copying:
    """One copy at a time, in a task of its own."""

    def __init__(self, running: RunningFleet) -> None:
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._aside = 0

    @property
    def under_way(self) -> bool:
        """Whether a copy is being written."""
        return self._task is not None and not self._task.done()

    async def unkept(self) -> str:
        """Why no server could write a copy now; "" if one could."""
        running = self._running
        targets = [replica.target for replica in self._near()]
        base = running.require_plan().base
        return await unsavable(targets, base=base, client=running.client)

    async def require(self) -> None:
        """Raise PreflightError if no server could write a copy now."""
        if reason := await self.unkept():
            hint = "leave keep out; or save a checkpoint, and push that"
            raise PreflightError(f"the weights cannot be kept: {reason}", hint=hint)

    def follow(self, job: Job) -> None:
        """A copy is due once this push, which leaves its weights in no file, has succeeded."""
        self._running.state.set(_DUE, job.id)

    def begin_if_due(self) -> None:
        """Begin a copy if it is due, and a server has the weights that nobody else acts on."""
        running = self._running
        if self.under_way or self._aside or running.push_job is not None or running.plan is None:
            return
        version = self._due_version()
        if version is None:
            return
        weights = running.state.weights()
        if weights.version != version or weights.checkpoint:
            self._failed(version, "the fleet has other weights by now")
            return
        with suppress(SkyctlError):  # it is tried again when a server's state changes
            source_of([replica.target for replica in self._near()], running.state)
            turn = running.arbiter.take(Act.VERB, f"a copy of {version} is written")
            self._task = asyncio.create_task(self._copy(version), name="copying")
            self._task.add_done_callback(lambda task: turn.release())  # also if it never ran

    async def over(self) -> None:
        """Wait until no copy is under way."""
        if self._task is not None:
            await asyncio.wait({self._task})

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """No copy is under way inside: one that was begins again afterwards."""
        self._aside += 1
        try:
            await self._cancel()
            yield
        finally:
            self._aside -= 1
            self.begin_if_due()

    async def stop(self, reason: str) -> None:
        """Give up a copy that is under way or due; none begins any more."""
        self._aside += 1
        await self._cancel()
        if (version := self._due_version()) is not None:
            self._failed(version, reason)

    async def _cancel(self) -> None:
        """End a copy that is under way: it leaves nothing, and is still due."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _due_version(self) -> str | None:
        """The version that is to be copied; None if none is, or its push has not succeeded."""
        state = self._running.state
        if not (name := state.get(_DUE)):
            return None
        with suppress(NotFoundError):
            job = state.journal.job(name)
            if job.result is not None:
                return str(job.result["version"])
            if not job.ended:
                return None
        state.set(_DUE, "")  # its push failed, which the push itself reports
        return None

    def _near(self) -> list[Replica]:
        """Servers that are up and see the fleet's own directory."""
        running = self._running
        return [
            replica
            for replica in running.replicas.values()
            if replica.phase is Phase.UP
            and (replica.spec.node is None or running.paths.shared is not None)
        ]

    async def _copy(self, version: str) -> None:
        try:
            saved = await self._saved(version)
        except SkyctlError as error:
            self._failed(version, error.message)
        except Exception as error:
            _LOG.exception("a copy of %s", version)
            self._failed(version, repr(error))
        else:
            running = self._running
            running.state.set(_DUE, "")
            reload_rows([*running.replicas.values()], running.state)
            running.state.add_event("fleet", f"{version} is kept in {saved.directory}")

    async def _saved(self, version: str) -> SavedWeights:
        """Copied by the first server that can. Raises the error of the last."""
        running = self._running
        failure: SkyctlError = PreflightError("no server has its weights any more")
        for replica in self._near():
            try:
                return await keep_weights(
                    version,
                    [replica.target],
                    kept=running.paths.kept,
                    base=running.require_plan().base,
                    state=running.state,
                    client=running.client,
                )
            except (PreflightError, ServerError) as error:
                failure = error
        raise failure

    def _failed(self, version: str, reason: str) -> None:
        self._running.state.set(_DUE, "")
        self._running.state.add_event("fleet", f"{version} was not kept: {reason}")
