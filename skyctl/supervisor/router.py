"""The router child: started on ready servers, restarted when it dies, its workers kept right."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from skyctl import engines
from skyctl.core.plan import RouterSpec
from skyctl.engines.logs import tail, telling_line
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.launch.base import ChildProcess
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.kept import KeptRunning
from skyctl.units import format_seconds

READY_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0
SYNC_INTERVAL_S = 5.0
NAME = "router"


class RouterChild(KeptRunning):
    """One router. `desired()` gives the URLs to route to, by server name.

    States: waiting (for a first server), starting, ready, restarting, stopping, stopped, dead,
    failed. Call `wake()` whenever `desired()` may have changed.
    """

    role = "router"

    def __init__(
        self,
        spec: RouterSpec,
        *,
        state: FleetState,
        paths: FleetPaths,
        client: ControlClient,
        config: FleetConfig,
        desired: Callable[[], Mapping[str, str]],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(NAME, state=state, paths=paths, changed=changed, clock=clock)
        self.spec = spec
        self.workers: frozenset[str] = frozenset()  # URLs it routes to, as it last said
        self._config = config
        self._desired = desired
        self._routing = engines.routing(config.engine)
        self._client = self._routing.client(client, spec.url, CALL_TIMEOUT_S)
        self._woken = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._heard = False  # it listed its workers since this was last set

    @property
    def state(self) -> str:
        """One word for `status`."""
        return self.phase

    @property
    def running_spec(self) -> RouterSpec:
        return self.spec

    @property
    def config(self) -> FleetConfig:
        return self._config

    def wake(self) -> None:
        """Look at `desired()` again."""
        self._woken.set()

    async def sync(self) -> None:
        """Make the router's workers what `desired()` says, now. A no-op while it is not ready.

        Raises:
            ServerError: the router did not do it.
        """
        if self.state != "ready":
            return
        async with self._syncing:
            wanted = set(self._desired().values())
            actual = set(await self._client.workers())
            self._heard = True  # adding a server that is dead takes long; that is not its fault
            for url in sorted(actual - wanted):
                await self._client.remove_worker(url)
            for url in sorted(wanted - actual):
                await self._client.add_worker(url)
            self._set_workers(frozenset(wanted))

    async def _one_life(self, adopted: ChildProcess | None) -> str:
        self._to("waiting")
        while not adopted and not self._desired():
            self._woken.clear()
            await self._woken.wait()
        self._to("starting")
        self.process = self._adopt(adopted) if adopted else self._spawn_router()
        if reason := await self._until_ready(self.process):
            return reason
        self._to("ready")
        return await self._keep_workers(self.process)

    def _spawn_router(self) -> ChildProcess:
        urls = sorted(self._desired().values())
        return self._spawn([*self.spec.argv, *self._routing.workers(urls)], self.spec.env)

    def _after_end(self) -> None:
        self._set_workers(frozenset())

    async def _until_ready(self, process: ChildProcess) -> str:
        deadline = self._clock() + READY_TIMEOUT_S
        while not process.exited.is_set():
            with contextlib.suppress(SkyctlError):
                # answering is enough: its own health checks may lag behind ours
                self._set_workers(frozenset(await self._client.workers()))
                return ""
            if self._clock() > deadline:
                return f"not ready after {format_seconds(READY_TIMEOUT_S)}"
            await asyncio.sleep(0.2)
        return self._death(process)

    async def _keep_workers(self, process: ChildProcess) -> str:
        exited, unheard = asyncio.create_task(process.exited.wait()), 0
        try:
            while not process.exited.is_set():
                self._woken.clear()
                self._heard = False
                try:
                    await self.sync()
                    self._note("")
                except SkyctlError as error:
                    self._note(error.message)
                unheard = 0 if self._heard else unheard + 1
                if unheard >= self._config.health.failures:
                    return f"does not answer: {self.reason}"
                woken = asyncio.create_task(self._woken.wait())
                await asyncio.wait(
                    {exited, woken}, timeout=SYNC_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                woken.cancel()
        finally:
            exited.cancel()
        return self._death(process)

    def _death(self, process: ChildProcess) -> str:
        why = telling_line(tail(self._paths.log(NAME), 100))
        return process.exit_text() + (f": {why}" if why else "")

    def _set_workers(self, workers: frozenset[str]) -> None:
        if workers != self.workers:
            self.workers = workers
            self._changed()

    def _note(self, reason: str) -> None:
        if reason != self.reason:
            self.reason = reason
            self._changed()
