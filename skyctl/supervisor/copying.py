"""The fleet's own copy of what a push has left only in servers' memory: written out of a server
while all serve. The next push waits for it.
"""

from __future__ import annotations

import asyncio
import logging

from skyctl.core.arbiter import Act, Turn
from skyctl.core.saving import keep_weights
from skyctl.errors import SkyctlError
from skyctl.states import Phase
from skyctl.supervisor.fleet import RunningFleet
from skyctl.supervisor.replica import reload_rows

_LOG = logging.getLogger(__name__)


class Copying:
    """One copy at a time, in a task of its own."""

    def __init__(self, running: RunningFleet) -> None:
        self._running = running
        self._task: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a copy is being written."""
        return self._task is not None and not self._task.done()

    def begin(self, version: str) -> None:
        """Copy the weights that the fleet serves. The push that brought them has just ended."""
        try:
            turn = self._running.arbiter.take(Act.VERB, f"a copy of {version} is written")
        except SkyctlError as error:
            self._failed(version, error.message)
            return
        self._task = asyncio.create_task(self._copy(version, turn), name="copying")

    async def over(self) -> None:
        """Wait until no copy is under way."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Give up a copy that is under way: it leaves nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _copy(self, version: str, turn: Turn) -> None:
        running = self._running
        near = [
            replica
            for replica in running.replicas.values()
            if replica.phase is Phase.UP
            and (replica.spec.node is None or running.paths.shared is not None)
        ]
        try:
            with turn:
                saved = await keep_weights(
                    version,
                    [replica.target for replica in near],
                    kept=running.paths.kept,
                    base=running.require_plan().base,
                    state=running.state,
                    client=running.client,
                )
        except SkyctlError as error:
            self._failed(version, error.message)
        except asyncio.CancelledError:
            self._failed(version, "the fleet went down meanwhile")
        except Exception as error:
            _LOG.exception("a copy of %s", version)
            self._failed(version, repr(error))
        else:
            reload_rows([*running.replicas.values()], running.state)
            running.state.add_event("fleet", f"{version} is kept in {saved.directory}")

    def _failed(self, version: str, reason: str) -> None:
        self._running.state.add_event("fleet", f"{version} was not kept: {reason}")
