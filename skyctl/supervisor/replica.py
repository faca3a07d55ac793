"""One replica: a vLLM server kept running, and the state it is in.

    phase        means                                    goes on to
    stopped      no process, none wanted                  starting
    waiting      its GPU is loading another replica       starting
    starting     spawned, not ready yet                   admitting, restarting, failed
    admitting    ready; taking the fleet's weights        up
    up           serves                                   restarting, dead
    restarting   died; waits for its backoff              starting
    stopping     being stopped                            stopped
    dead         died, and the policy is never restart    starting (by hand)
    failed       never got ready, or restarted too often  starting (by hand)

A replica that is `up` shows its condition instead: quarantined, updating, asleep, paused, ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from skyctl.control.http import ControlClient
from skyctl.control.target import ServerTarget
from skyctl.errors import ServerError, SkyctlError
from skyctl.fleet.credentials import API_KEY, CONTROL_TOKEN, Credentials
from skyctl.fleet.in_doubt import trust
from skyctl.fleet.paths import FleetPaths
from skyctl.fleet.plan import ServerSpec
from skyctl.fleet.ports import port_holder
from skyctl.fleet.schema import FleetConfig
from skyctl.fleet.state import FleetState, ProcessRow, ServerRow
from skyctl.kill_points import reached
from skyctl.supervisor.health import FailureCount, probe_alive, probe_ready
from skyctl.supervisor.logtail import tail, telling_line
from skyctl.supervisor.process import ManagedProcess, new_token
from skyctl.supervisor.restarts import decide
from skyctl.supervisor.wire import spec_hash
from skyctl.units import format_seconds

_LOG = logging.getLogger(__name__)

READY_POLL_S = 0.5
_ADOPTED_TIMEOUT_S = 10.0
SETTLED = ("up", "dead", "failed", "stopped")


@dataclass
class ReplicaContext:
    """What every replica of a fleet shares. `admit` brings a fresh server to the fleet's weights;
    `gate` is entered from spawn to ready; `changed` is called after every change of state."""

    state: FleetState
    paths: FleetPaths
    client: ControlClient
    config: FleetConfig
    credentials: Credentials
    admit: Callable[[Replica], Awaitable[None]]
    gate: Callable[[ServerSpec], AbstractAsyncContextManager[object]]
    changed: Callable[[], None]
    clock: Callable[[], float] = time.monotonic


class Replica:
    """Keeps one server running until `stop()`. Its attributes are for reading."""

    def __init__(self, spec: ServerSpec, context: ReplicaContext) -> None:
        self.spec = spec
        self.phase = "stopped"
        self.reason = ""
        self.process: ManagedProcess | None = None
        self.started_at: float | None = None  # epoch seconds
        self.restarts: list[float] = []  # on the context's clock
        self.observed_paused: bool | None = None
        self.update_state = ""  # what a push job says of this server while it runs
        self.state_since = time.time()  # epoch seconds
        self.settled = asyncio.Event()  # up, or given up
        self.adopted = False  # its process was started by an earlier supervisor
        self._context = context
        self._proven = False  # was up once with this spec: worth restarting
        self._task: asyncio.Task[None] | None = None
        self._row = context.state.server(spec.name)
        self._shown = self.state

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def target(self) -> ServerTarget:
        credentials = self._context.credentials
        env = credentials.fill(self.spec.env)
        # one that was adopted may ask for a token that the fleet file no longer asks for
        key = env.get(CONTROL_TOKEN) or env.get(API_KEY) or credentials.control
        return ServerTarget(self.name, self.spec.url, key)

    @property
    def running_hash(self) -> str:
        """Of the spec that its process was started with; an adopted one may have another."""
        return self._record.spec_hash if self.process is not None else spec_hash(self.spec)

    @property
    def instance(self) -> str:
        """Names the running process: another one has another name. "" while there is none."""
        identity = self.process.identity if self.process else None
        return f"{identity.pid}@{identity.create_time}" if identity else ""

    @property
    def weights_awake(self) -> bool:
        """Whether it sleeps but for its weights, which were woken."""
        return self.name in self._context.state.weights_awake()

    @property
    def row(self) -> ServerRow:
        """What is meant to be true of this server, as in the state file."""
        return self._row

    @property
    def state(self) -> str:
        """One word for `status`: the phase, or the condition of a server that is up."""
        if self.phase == "waiting":
            return "starting"
        if self.phase == "admitting":
            return "quarantined" if self._row.quarantine else "updating"
        if self.phase != "up":
            return self.phase
        if self._row.quarantine:
            return "quarantined"
        if self.update_state:
            return self.update_state
        if self._row.intended == "asleep":
            return "asleep"
        return "paused" if self.observed_paused else "ready"

    def start(self, adopted: ManagedProcess | None = None) -> None:
        """Run the server from now on, beginning with an adopted process if there is one."""
        if self._task is not None and not self._task.done():
            return
        self.settled.clear()
        self.adopted = self._proven = adopted is not None
        self._task = asyncio.create_task(self._run(adopted), name=f"replica {self.name}")

    async def stop(self) -> None:
        """Stop the server's whole tree and keep it stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._to("stopping")
        await self._end_process()
        self._proven = False
        self.restarts.clear()
        self._to("stopped")

    def update_row(self, **changes: object) -> None:
        """Change what is meant to be true of this server, in the state file too."""
        self._row = self._context.state.update_server(self.name, **changes)
        self._context.changed()

    def forget_weights(self) -> None:
        """A fresh process has the base weights, whatever the one before it had."""
        self.update_row(
            weight_version=None,
            checkpoint=None,
            checkpoint_digest=None,
            weights_digest=None,
            quarantine=None,
        )
        trust(self._context.state, self.name)
        self._context.state.set_weights_awake(self.name, False)

    def reload_row(self) -> None:
        """Take over what somebody else wrote to the state file."""
        self._row = self._context.state.server(self.name)
        self._context.changed()

    def observe(self, *, paused: bool) -> None:
        """A probe or a verb learned whether the server is paused."""
        if paused != self.observed_paused:
            self.observed_paused = paused
            self._context.changed()

    def note_state(self) -> None:
        """Keep the time of the last change of `state`; call it after anything changed."""
        if self.state != self._shown:
            self._shown, self.state_since = self.state, time.time()

    def log_tail(self, lines: int = 20) -> list[str]:
        return tail(self._context.paths.log(self.name), lines)

    # --- the life of a server ------------------------------------------------------------------

    async def _run(self, adopted: ManagedProcess | None) -> None:
        while True:
            try:
                reason = await self._one_life(adopted)
            except SkyctlError as error:
                reason = error.message
            except Exception as error:
                _LOG.exception("replica %s", self.name)
                reason = f"the supervisor failed: {error!r} (see: skyctl logs supervisor)"
            adopted = None
            self._context.state.add_event(self.name, reason)
            if not self._proven:
                await self._give_up("failed", reason)
                return
            now = self._context.clock()
            decision = decide(self._context.config.restart, self.restarts, now)
            if not decision.restart:
                never = self._context.config.restart.policy == "never"
                await self._give_up("dead" if never else "failed", f"{reason}; {decision.why}")
                return
            self.restarts.append(now)
            wait = format_seconds(decision.wait_s)
            # out of the router at once, while the rest of its tree is still being stopped
            self._to("restarting", f"{reason}; starting again in {wait}")
            await self._end_process()
            await asyncio.sleep(decision.wait_s)

    async def _give_up(self, phase: str, reason: str) -> None:
        self._to("stopping", reason)
        await self._end_process()
        self._to(phase, reason)

    async def _one_life(self, adopted: ManagedProcess | None) -> str:
        """From spawn to death; why it died."""
        self._to("starting" if adopted else "waiting")
        async with contextlib.nullcontext() if adopted else self._context.gate(self.spec):
            self.process = adopted or self._spawn()
            if adopted:
                self._adopt(adopted)
            self._to("starting", self.reason)
            if reason := await self._until_ready(self.process):
                return reason
        reached("server.ready")
        self._to("admitting")
        if reason := await self._unless_dead(self.process, self._context.admit(self)):
            return reason
        self._proven = True
        self._to("up")
        return await self._watch(self.process)

    def _spawn(self) -> ManagedProcess:
        """Intent is on disk before the process is, its identity right after."""
        context, spec = self._context, self.spec
        intent = ProcessRow(
            name=spec.name,
            role="server",
            phase="intended",
            token=new_token(),
            identity=None,
            spec_hash=spec_hash(spec),
            host=spec.host,
            port=spec.port,
            gpus=spec.gpus,
            started_at=time.time(),
        )
        context.state.save_process(intent)
        reached("server.intended")
        self.forget_weights()
        self.observed_paused, self.update_state = None, ""
        env = context.credentials.fill(spec.env)
        process = ManagedProcess.spawn(spec.argv, env, context.paths.log(spec.name), intent.token)
        reached("server.spawned")
        self._record = replace(intent, phase="running", identity=process.identity)
        context.state.save_process(self._record)
        reached("server.recorded")
        self.started_at = intent.started_at
        return process

    def _adopt(self, process: ManagedProcess) -> None:
        found = self._context.state.process(self.name)
        assert found is not None  # adopted processes come from the state file
        self._record = found
        self.started_at = found.started_at
        self._context.state.add_event(self.name, f"adopted (pid {process.pid})")

    async def _until_ready(self, process: ManagedProcess) -> str:
        """ "" once the server is ready, else why it never was."""
        policy, began = self._context.config.health, self._context.clock()
        patience_s = policy.startup_timeout_s
        if self.adopted and self.started_at is not None:
            # what was up long ago and does not answer is stuck: it is not starting any more
            patience_s = max(_ADOPTED_TIMEOUT_S, patience_s - (time.time() - self.started_at))
        while not process.exited.is_set():
            self._record_descendants(process)
            # looked at first: a foreign process that took the port must not be sent our token
            ours, paused = process.listens_at(self.spec.port), None
            if ours:
                paused = await probe_ready(self._context.client, self.target, policy.timeout_s)
            if paused is not None:
                self.observed_paused = paused
                return ""
            if self._context.clock() - began > patience_s:
                taken = not ours and port_holder(self.spec.host, self.spec.port) is not None
                why = f": another process answers at port {self.spec.port}" if taken else ""
                return f"not ready after {format_seconds(patience_s)}{why}"
            await _wait(process.exited, READY_POLL_S)
        return self._death(process)

    async def _unless_dead(self, process: ManagedProcess, work: Awaitable[None]) -> str:
        """Await `work` unless the process dies first; why it died, or ""."""
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

    async def _watch(self, process: ManagedProcess) -> str:
        """Probe until the server dies or stops answering; why."""
        policy = self._context.config.health
        failures = FailureCount(policy)
        while not await _wait(process.exited, policy.interval_s):
            self._record_descendants(process)
            try:
                paused = await probe_alive(self._context.client, self.target, policy.timeout_s)
            except ServerError as error:
                # A push may block the engine for as long as its own deadlines allow.
                if not self.update_state and (verdict := failures.failed(error)):
                    return verdict
                self._note_failures(failures)
                continue
            failures.succeeded()
            self._note_failures(failures)
            self.observe(paused=paused)
        return self._death(process)

    def _note_failures(self, failures: FailureCount) -> None:
        reason = f"{failures.count} health probes in a row failed" if failures.count else ""
        if reason != self.reason:
            self.reason = reason
            self._context.changed()

    def _death(self, process: ManagedProcess) -> str:
        lived = format_seconds(max(0.0, time.time() - (self.started_at or time.time())))
        why = telling_line(self.log_tail(200))
        return f"{process.exit_text()} after {lived}" + (f": {why}" if why else "")

    def _record_descendants(self, process: ManagedProcess) -> None:
        if process.record_descendants():
            self._record = replace(self._record, descendants=process.descendants)
            self._context.state.save_process(self._record)

    async def _end_process(self) -> None:
        """Stop whatever is left of the tree; also after the leader was killed."""
        process, self.process = self.process, None
        if process is None:
            return
        reached("server.stopping")
        await process.stop(self._context.config.stop_timeout_s)
        reached("server.stopped")
        self._context.state.mark_stale(self.name)
        self.started_at = None
        self.observed_paused, self.update_state = None, ""

    def _to(self, phase: str, reason: str = "") -> None:
        self.phase, self.reason = phase, reason
        if phase in SETTLED:
            self.settled.set()
        self._context.changed()


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """True when the event is set within `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
