"""The router child: started on ready servers, restarted when it dies, its workers kept right."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from skyctl.control.http import ControlClient
from skyctl.control.router import RouterClient
from skyctl.errors import SkyctlError
from skyctl.fleet.paths import FleetPaths
from skyctl.fleet.plan import RouterSpec
from skyctl.fleet.schema import FleetConfig
from skyctl.fleet.state import FleetState, ProcessRow
from skyctl.kill_points import reached
from skyctl.supervisor.logtail import tail, telling_line
from skyctl.supervisor.process import ManagedProcess, new_token
from skyctl.supervisor.restarts import decide
from skyctl.supervisor.wire import spec_hash
from skyctl.units import format_seconds

_LOG = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0
SYNC_INTERVAL_S = 5.0
NAME = "router"


class RouterChild:
    """One vllm-router. `desired()` gives the URLs to route to, by server name.

    States: waiting (for a first server), starting, ready, restarting, stopping, stopped, dead,
    failed. Call `wake()` whenever `desired()` may have changed.
    """

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
        self.spec = spec
        self.state = "stopped"
        self.reason = ""
        self.process: ManagedProcess | None = None
        self.started_at: float | None = None
        self.restarts: list[float] = []
        self.workers: frozenset[str] = frozenset()  # URLs it routes to, as it last said
        self.settled = asyncio.Event()
        self._store = state
        self._paths = paths
        self._config = config
        self._desired = desired
        self._changed = changed
        self._clock = clock
        self._client = RouterClient(client, spec.url, timeout_s=CALL_TIMEOUT_S)
        self._woken = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._heard = False  # it listed its workers since this was last set
        self._task: asyncio.Task[None] | None = None

    @property
    def running_hash(self) -> str:
        """Of the spec that its process was started with; an adopted one may have another."""
        return self._record.spec_hash if self.process is not None else spec_hash(self.spec)

    def start(self, adopted: ManagedProcess | None = None) -> None:
        """Run the router from now on, once there is a server to route to."""
        if self._task is None or self._task.done():
            self.settled.clear()
            self._task = asyncio.create_task(self._run(adopted), name="router")

    def wake(self) -> None:
        """Look at `desired()` again."""
        self._woken.set()

    async def stop(self) -> None:
        """Stop the router and keep it stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._to("stopping")
        await self._end_process()
        self._to("stopped")

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

    async def _run(self, adopted: ManagedProcess | None) -> None:
        while True:
            try:
                reason = await self._one_life(adopted)
            except SkyctlError as error:
                reason = error.message
            except Exception as error:
                _LOG.exception("router")
                reason = f"the supervisor failed: {error!r} (see: skyctl logs supervisor)"
            adopted = None
            self._store.add_event(NAME, reason)
            now = self._clock()
            decision = decide(self._config.restart, self.restarts, now)
            wait = format_seconds(decision.wait_s)
            self._to("restarting", f"{reason}; starting again in {wait}")
            await self._end_process()
            if not decision.restart:
                phase = "dead" if self._config.restart.policy == "never" else "failed"
                self._to(phase, f"{reason}; {decision.why}")
                return
            self.restarts.append(now)
            await asyncio.sleep(decision.wait_s)

    async def _one_life(self, adopted: ManagedProcess | None) -> str:
        self._to("waiting")
        while not adopted and not self._desired():
            self._woken.clear()
            await self._woken.wait()
        self._to("starting")
        self.process = adopted or self._spawn(sorted(self._desired().values()))
        if adopted:
            self._record = self._recorded()
            self.started_at = self._record.started_at
        if reason := await self._until_ready(self.process):
            return reason
        self._to("ready")
        return await self._keep_workers(self.process)

    def _spawn(self, urls: list[str]) -> ManagedProcess:
        spec = self.spec
        intent = ProcessRow(
            name=NAME,
            role="router",
            phase="intended",
            token=new_token(),
            identity=None,
            spec_hash=spec_hash(spec),
            host=spec.host,
            port=spec.port,
            started_at=time.time(),
        )
        self._store.save_process(intent)
        reached("router.intended")
        argv = [*spec.argv, "--worker-urls", *urls]
        process = ManagedProcess.spawn(argv, spec.env, self._paths.log(NAME), intent.token)
        reached("router.spawned")
        self._record = replace(intent, phase="running", identity=process.identity)
        self._store.save_process(self._record)
        reached("router.recorded")
        self.started_at = intent.started_at
        return process

    def _recorded(self) -> ProcessRow:
        found = self._store.process(NAME)
        assert found is not None  # adopted processes come from the state file
        return found

    async def _until_ready(self, process: ManagedProcess) -> str:
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

    async def _keep_workers(self, process: ManagedProcess) -> str:
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

    def _death(self, process: ManagedProcess) -> str:
        why = telling_line(tail(self._paths.log(NAME), 100))
        return process.exit_text() + (f": {why}" if why else "")

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await process.stop(self._config.stop_timeout_s)
            self._store.mark_stale(NAME)
        self.started_at = None
        self._set_workers(frozenset())

    def _set_workers(self, workers: frozenset[str]) -> None:
        if workers != self.workers:
            self.workers = workers
            self._changed()

    def _note(self, reason: str) -> None:
        if reason != self.reason:
            self.reason = reason
            self._changed()

    def _to(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason
        if state in ("ready", "dead", "failed", "stopped"):
            self.settled.set()
        self._changed()
