"""What replicas and fronts have in common: one child process, kept running until `stop()`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from skyctl.core.plan import FrontSpec, ServerSpec
from skyctl.engines.logs import mark_start, why_it_died
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.kill_points import reached
from skyctl.launch import HOSTS
from skyctl.launch.base import ChildProcess, Host
from skyctl.states import FleetEvent, Phase
from skyctl.store.paths import FleetPaths
from skyctl.store.processes import ProcessRow, Role
from skyctl.store.state import FleetState
from skyctl.supervisor.reconcile import settings_of
from skyctl.supervisor.restarts import decide, forget, remember, remembered
from skyctl.supervisor.wire import spec_hash
from skyctl.units import format_seconds

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def _logged(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        _LOG.exception("%s: not put on record", name)


@dataclass(kw_only=True)
class Context:
    """What all that a fleet keeps running is given of it."""

    state: FleetState
    """The fleet's record."""
    paths: FleetPaths
    """Where its files are."""
    client: ControlClient
    """For calls to its servers."""
    config: Callable[[], FleetConfig]
    """Returns the policies in force."""
    changed: Callable[[], None]
    """Is called after every change of state."""


class KeptRunning(ABC):
    """Restarted when it dies, as the restart policy allows. Its attributes are read-only to others.

    A subclass defines one life, from spawn to death, and may give up before the policy does.
    `settled` is set while it is up, was given up, or waits for a machine that does not answer.
    """

    role: Role

    def __init__(self, name: str, spec: ServerSpec | FrontSpec, context: Context) -> None:
        self.name = name
        self.planned = spec  # its next process is started with it
        self._context = context
        self._worth_restarting = True  # False: it is given up, whatever the policy says
        self.phase = Phase.STOPPED
        self.reason = ""
        self.process: ChildProcess | None = None
        self.started_at: float | None = None  # epoch seconds
        # restarts under an earlier supervisor count as well
        history = remembered(context.state, name, time.monotonic())
        self.restarts, self.restart_reason = history  # on the monotonic clock
        self.settled = asyncio.Event()
        self.adopted = False  # its process was started by an earlier supervisor
        self._task: asyncio.Task[None] | None = None
        self._ending: ChildProcess | None = None  # being stopped
        self._unsaved = False  # what is known of its process is not on record

    @property
    def config(self) -> FleetConfig:
        """The policies in force."""
        return self._context.config()

    @abstractmethod
    async def _one_life(self, adopted: ChildProcess | None) -> str:
        """One life, from spawn (or from an adopted process) to death; returns why it died."""

    @property
    def host(self) -> Host:
        """Where its process runs."""
        host, spec = HOSTS[self.config.launcher], self.planned
        if isinstance(spec, ServerSpec) and spec.node is not None and host.on is not None:
            return host.on(spec.node, spec.followers)
        return host

    def _before_spawn(self) -> None:  # noqa: B027 - optional hook
        """Called when its intent is on disk and its process does not exist yet."""

    def _after_end(self) -> None:  # noqa: B027 - as above
        """Called when its process is gone."""

    @property
    def running_hash(self) -> str:
        """Hash of the spec that its process was started with; an adopted one's may differ."""
        return self._record.spec_hash if self.process else spec_hash(self.planned)

    @property
    def has_memory(self) -> bool:
        """Whether a process of it may still have memory: it lives, or is being ended."""
        return self.process is not None or self._ending is not None

    def start(self, adopted: ChildProcess | None = None) -> None:
        """Keep it running from now on, beginning with an adopted process if there is one."""
        if self._task is not None and not self._task.done():
            return
        self.settled.clear()
        self.adopted = adopted is not None
        self._task = asyncio.create_task(self._run(adopted), name=self.name)

    def start_after(self, ending: ChildProcess) -> None:
        """Keep it running once the rest of an earlier process has certainly ended."""
        self._ending = ending
        self.start()

    async def stop(self) -> None:
        """Stop its whole process tree and keep it stopped.

        Raises:
            HostUnreachable: it is unknown whether it has ended.
            SkyctlError: it has not.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._to(Phase.STOPPING)
        try:
            await self._end_process()
        except SkyctlError as error:  # the next start ends this one first
            self._to(Phase.FAILED, error.message)
            raise
        self.restarts.clear()
        self.restart_reason = ""
        with contextlib.suppress(SkyctlError):
            forget(self._context.state, self.name)
        self._to(Phase.STOPPED)

    async def release_process(self) -> None:
        """Look after its process no longer: that lives on, and is the caller's."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.process = self._ending = None
        self._to(Phase.STOPPED)

    async def _run(self, adopted: ChildProcess | None) -> None:
        while True:
            try:
                if self._ending is not None:  # could not be ended before
                    await self._end_for_certain()
                reason = await self._one_life(adopted)
            except SkyctlError as error:
                reason = error.message
            except Exception as error:
                _LOG.exception("%s", self.name)
                reason = f"the supervisor failed: {error!r} (see: skyctl logs supervisor)"
            adopted = None
            self._event(reason, FleetEvent.PROCESS_DIED)
            if not self._worth_restarting:
                await self._give_up(Phase.FAILED, reason)
                return
            now, policy = time.monotonic(), self.config.restart
            decision = decide(policy, self.restarts, now)
            if not decision.restart:
                given_up = Phase.DEAD if policy.policy == "never" else Phase.FAILED
                await self._give_up(given_up, f"{reason}; {decision.reason}")
                return
            self.restarts.append(now)
            self.restart_reason = reason
            with contextlib.suppress(SkyctlError):  # a counter for display is not worth a server
                remember(self._context.state, self.name, reason)
            wait = format_seconds(decision.wait_s)
            # out of the router at once, while the rest of its tree is still being stopped
            self._to(Phase.RESTARTING, f"{reason}; starting again in {wait}")
            try:
                await self._end_for_certain()
            except SkyctlError as error:  # what cannot be ended still has its port and its GPU
                await self._give_up(Phase.FAILED, f"{reason}; {error.message}")
                return
            await asyncio.sleep(decision.wait_s)

    async def _give_up(self, phase: Phase, reason: str) -> None:
        self._to(Phase.STOPPING, reason)
        try:
            await self._end_process()
        except SkyctlError as error:
            if error.message not in reason:
                reason = f"{reason}; {error.message}"
        self._to(phase, reason)

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> ChildProcess:
        """Spawn a process: its intent is on record before it exists, its identity right after.

        Raises:
            SkyctlError: the intent cannot be put on record, or the process cannot be started.
        """
        spec = self.planned
        intent = ProcessRow(
            name=self.name,
            role=self.role,
            phase="intended",
            token=secrets.token_hex(8),
            identity=None,
            spec_hash=spec_hash(spec),
            host=spec.host,
            port=spec.port,
            gpus=spec.gpus if isinstance(spec, ServerSpec) else (),
            started_at=time.time(),
            settings=settings_of(spec),
        )
        self._context.state.save_process(intent)
        self.adopted = False
        self._event("starting")
        reached(f"{self.role}.intended")
        self._before_spawn()
        env = {**self.host.environment(self._context.paths), **env}
        log = self._context.paths.log(self.name)
        mark_start(log, self.name, intent.started_at)
        process = self.host.spawn(argv, env, log, intent.token)
        reached(f"{self.role}.spawned")
        self._save(replace(intent, phase="running", identity=process.identity))
        reached(f"{self.role}.recorded")
        self.started_at = intent.started_at
        return process

    def _adopt(self, process: ChildProcess) -> ChildProcess:
        """Take over the record of a process that an earlier supervisor started."""
        recorded = self._context.state.process(self.name)
        assert recorded is not None  # adopted processes come from the state file
        self._record = recorded
        self.started_at = recorded.started_at
        self._event(f"adopted (pid {process.pid})")
        return process

    async def _unless_dead(self, process: ChildProcess, work: Awaitable[object]) -> str:
        """Await `work` unless the process dies first; returns why it died, or ""."""
        working = asyncio.ensure_future(work)
        dying = asyncio.create_task(process.exited.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return self._death(process)
            await working
            return ""
        finally:
            for task in (working, dying):
                task.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)

    def _death(self, process: ChildProcess) -> str:
        """How its process ended, and the error that it wrote."""
        how = process.exit_text()
        # SIGKILL comes without a warning: an error in the log is an earlier one
        reason = "" if "SIGKILL" in how else why_it_died(self._context.paths.log(self.name))
        return f"{how}{self._lifetime()}" + (f": {reason}" if reason else "")

    def _lifetime(self) -> str:
        """` after 5 s`, where how long it lived is worth telling."""
        return ""

    def _event(self, message: str, kind: FleetEvent | None = None) -> None:
        """Add one line of history. A failed write says nothing about the process: it neither ends a
        live one nor keeps a dead one.
        """
        with _logged(self.name):
            self._context.state.add_event(self.name, message, kind)

    def _save(self, record: ProcessRow) -> None:
        """Record what is known of its process; a failed write is repeated with the next change or
        probe.
        """
        self._record, self._unsaved = record, True
        self._save_again()

    def _save_again(self) -> None:
        if self._unsaved:
            with _logged(self.name):
                self._context.state.save_process(self._record)
                self._unsaved = False

    async def _end_process(self) -> None:
        """Stop whatever is left of the tree; also after the leader was killed.

        If cancelled, it leaves the process to the next call, which finishes it.
        """
        if self.process is not None:
            self._ending, self.process = self.process, None
        if self._ending is not None:
            reached(f"{self.role}.stopping")
            await self._ending.stop(self.config.stop_timeout_s)
            self._ending = None
            reached(f"{self.role}.stopped")
            with _logged(self.name):
                self._context.state.mark_stale(self.name)
        self.started_at = None
        self._after_end()

    async def _end_for_certain(self) -> None:
        """As `_end_process`, but waits as long as its machine cannot be asked: it may still run
        there.
        """
        while True:
            try:
                return await self._end_process()
            except HostUnreachable as error:
                self._to(Phase.UNREACHABLE, error.message)
            await asyncio.sleep(self.config.restart.backoff_max_s)

    def _to(self, phase: Phase, reason: str = "") -> None:
        self.phase, self.reason = phase, reason
        if phase.settled:
            self.settled.set()
        self._context.changed()
