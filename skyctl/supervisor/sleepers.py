"""Servers that were removed by load and sleep: processes outside the fleet, closed to users, that a
new replica of the same name and settings may wake instead of starting another.

A new supervisor knows none of them: it ends them like any process that its plan does not have.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from skyctl import engines
from skyctl.core import actions
from skyctl.core.plan import ServerSpec
from skyctl.engines.base import Feature
from skyctl.errors import SkyctlError
from skyctl.http.client import ControlClient
from skyctl.launch.base import ChildProcess
from skyctl.store.state import FleetState
from skyctl.supervisor.replica import Replica
from skyctl.supervisor.wire import spec_hash
from skyctl.units import format_seconds

_LOG = logging.getLogger(__name__)
_SLEEP_TIMEOUT_S = 120.0
"""The first sleep of a large model copies it into memory that must be pinned first."""


@dataclass
class Sleeper:
    """A server outside the fleet."""

    spec: ServerSpec
    """What it was started with."""
    process: ChildProcess
    """Its process."""
    since: float | None = None
    """When it fell asleep, on the monotonic clock; None before, and once it is being ended."""


class Sleepers:
    """Those of one fleet, by name."""

    def __init__(self, state: FleetState, client: ControlClient) -> None:
        self._state = state
        self._client = client
        self._sleepers: dict[str, Sleeper] = {}

    @property
    def asleep(self) -> tuple[str, ...]:
        """Those that can be woken."""
        return tuple(n for n, s in self._sleepers.items() if s.since is not None)

    @property
    def ports(self) -> dict[str, int]:
        """Their ports by name: a replica with other ones could not wake them."""
        return {name: sleeper.spec.port for name, sleeper in self._sleepers.items()}

    def start(self, replica: Replica) -> None:
        """Start a new replica, from the sleeping process of its name if that has its settings;
        another one is ended first.
        """
        sleeper = self._sleepers.pop(replica.name, None)
        if sleeper is None:
            replica.start()
        elif sleeper.since is None or spec_hash(sleeper.spec) != spec_hash(replica.planned):
            replica.start_after(sleeper.process)
        else:
            self._state.add_event(replica.name, "is woken")
            replica.wake_up(sleeper.process)

    async def take(self, replica: Replica, *, sleep_s: float, stop_timeout_s: float) -> None:
        """Put a server to sleep that has left the fleet and has no more requests; stop it where it
        cannot sleep, or is not to.
        """
        target, spec = replica.target, replica.spec
        if replica.process is None:  # it died just now
            await replica.stop()
            self._state.forget_process(replica.name)
            return
        self._sleepers[replica.name] = sleeper = Sleeper(spec, replica.process)
        await replica.release_process()
        supported = Feature.SLEEP in engines.ENGINES[spec.engine].supports
        if sleep_s > 0 and supported:
            [outcome] = await actions.sleep(self._client, [target], timeout_s=_SLEEP_TIMEOUT_S)
            if outcome.ok:
                sleeper.since = time.monotonic()
                duration = format_seconds(sleep_s)
                self._state.add_event(replica.name, f"sleeps, for {duration} at most")
                return
            self._state.add_event(replica.name, f"does not sleep: {outcome.detail}")
        await self._end(replica.name, stop_timeout_s)

    async def end_old(self, *, sleep_s: float, stop_timeout_s: float) -> None:
        """Stop those that have slept for this long, and forget those that died."""
        now = time.monotonic()
        for name, sleeper in list(self._sleepers.items()):
            slept_s = 0.0 if sleeper.since is None else now - sleeper.since
            if sleeper.since is None or slept_s >= sleep_s or not sleeper.process.alive():
                await self._end(name, stop_timeout_s)

    async def _end(self, name: str, stop_timeout_s: float) -> None:
        sleeper = self._sleepers[name]
        sleeper.since = None  # it cannot be woken any more
        try:
            await sleeper.process.stop(stop_timeout_s)
        except SkyctlError as error:  # tried again with the next sample
            _LOG.warning("%s: %s", name, error.message)
            return
        if self._sleepers.get(name) is not sleeper:  # a replica of its name has begun meanwhile
            return
        del self._sleepers[name]
        self._state.forget_process(name)
        self._state.add_event(name, "stopped")
