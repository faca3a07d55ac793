"""One replica: a server kept running, and the state it is in (`skyctl/states.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from skyctl.children import bypassing
from skyctl.core.expectations import files_of
from skyctl.core.health import FailureCount, probe_alive, probe_ready, tokens_computed
from skyctl.core.plan import ServerSpec
from skyctl.engines import ENGINES
from skyctl.errors import DeadlineExceeded, ServerError, ServerUnreachable
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.launch.base import ChildProcess
from skyctl.states import FleetEvent, Phase, ReplicaState
from skyctl.store.adapters import record_server
from skyctl.store.base_weights import BaseFiles
from skyctl.store.credentials import CONTROL_TOKEN, Credentials
from skyctl.store.in_doubt import clear_doubt
from skyctl.store.paths import create_private_file
from skyctl.store.state import ServerRow
from skyctl.supervisor.kept import Context, KeptRunning
from skyctl.units import format_seconds

READY_POLL_S = 0.2
_ADOPTED_TIMEOUT_S = 10.0
_SETTLE_TIMEOUT_S = 5.0


@dataclass(kw_only=True)
class ReplicaContext(Context):
    """What a replica is given of its fleet."""

    credentials: Credentials
    """The fleet's secrets."""
    admit: Callable[[Replica], Awaitable[None]]
    """Brings a new server to the fleet's weights."""
    admitted: Callable[[Replica], bool]
    """Whether it has them, with no push under way that it would miss."""
    gate: Callable[[ServerSpec], AbstractAsyncContextManager[object]]
    """Is held from spawn to ready."""
    asleep_because: Callable[[], str]
    """Why no server of the fleet may load now, "" if one may."""
    pushing: Callable[[], bool]
    """Whether a push is under way."""
    unanswering: Callable[[Replica], str]
    """Names another server that is being replaced because it did not answer, or lets this one be
    replaced.
    """


class Replica(KeptRunning):
    """Keeps one server running until `stop()`. Its attributes are read-only to others."""

    role = "server"
    planned: ServerSpec
    _context: ReplicaContext

    def __init__(self, spec: ServerSpec, context: ReplicaContext) -> None:
        super().__init__(spec.name, spec, context)
        self._placed: ServerSpec | None = None  # set if its node was chosen at its spawn
        self.observed_paused: bool | None = None
        self._probes = self._observed = 0  # how many began; the latest whose answer counted
        self.lost = ""  # why it is unknown whether it still runs
        self.in_push = False  # a push that is under way keeps it from its users
        self.rehearsing = False  # its engine is busy with our questions
        self.pushed_alone = asyncio.Lock()  # by what brings it to the fleet's weights
        self.copied_from = asyncio.Lock()  # by what reads its weights for another, or by its sleep
        self.state_since = time.time()  # epoch seconds
        self.resume_when_up = False  # it may be paused, but should run
        self.intent_changed = False  # since it was last applied to the process
        self.reached_by_push = ""  # a failed push that reached it while it was starting
        self._closed = False
        self._worth_restarting = False  # until it was up once with this spec
        self.launched: BaseFiles | None = None  # what it was started from; None if not recorded
        self.compared = False  # with what the fleet came up with, since its start
        self.asleep = False  # its process sleeps, and is to be woken before it is admitted
        self._row = context.state.server(spec.name)
        self._shown = self.state

    @property
    def spec(self) -> ServerSpec:
        """The planned spec, at the place where it runs."""
        return self._placed or self.planned

    @property
    def target(self) -> ServerTarget:
        credentials = self._context.credentials
        key_variable = ENGINES[self.spec.engine].variables.key
        env = credentials.fill(self.spec.env, key_variable)
        # an adopted server may ask for a token that the fleet file no longer sets
        key = env.get(CONTROL_TOKEN) or env.get(key_variable) or credentials.control
        spec = self.spec
        holder = self._context.state.holder if env.get(CONTROL_TOKEN) else ""  # its guard's
        return ServerTarget(self.name, spec.url, key, spec.engine, holder=holder, role=spec.role)

    @property
    def instance(self) -> str:
        """Identifies the running process: another process has another value. "" while there is
        none.
        """
        identity = self.process.identity if self.process else None
        return f"{identity.pid}@{identity.create_time}" if identity else ""

    @property
    def row(self) -> ServerRow:
        """The intended state of this server, as in the state file."""
        return self._row

    @property
    def state(self) -> ReplicaState:
        """What `status` shows: the phase, or the condition of a server that is up."""
        if self.phase not in (Phase.ADMITTING, Phase.UP):
            return self.phase.state
        if self.lost and self.phase is Phase.UP:
            return ReplicaState.UNREACHABLE
        if self._row.quarantine:
            return ReplicaState.QUARANTINED
        if self.in_push or self.phase is Phase.ADMITTING:
            return ReplicaState.UPDATING
        if self._row.sleep_level:
            return ReplicaState.ASLEEP
        return ReplicaState.PAUSED if self.observed_paused else ReplicaState.READY

    def start(self, adopted: ChildProcess | None = None) -> None:
        self._worth_restarting = self._worth_restarting or adopted is not None
        super().start(adopted)

    def wake_up(self, process: ChildProcess) -> None:
        """Keep a sleeping process running from now on, and admit it like any that starts."""
        self.asleep = True
        self.start(process)

    async def stop(self) -> None:
        await super().stop()
        self._worth_restarting = False
        self._release()

    def update_row(self, **changes: object) -> None:
        """Change the intended state of this server, in the state file too."""
        self.reload_row(self._context.state.update_server(self.name, **changes))

    def forget_weights(self) -> None:
        """A new process has the base weights, whatever the previous one held."""
        state = self._context.state
        with state.transaction():
            clear_doubt(state, self.name)
            self.update_row(
                weight_version=None,
                checkpoint=None,
                checkpoint_digest=None,
                weights_digest=None,
                quarantine=None,
                weights_awake=False,
            )

    def hold(self) -> None:
        """Until it is up and not quarantined, let it answer only us (`engines/inside/guard.py`)."""
        os.close(create_private_file(self._context.paths.hold_file(self.name)))

    def close(self) -> None:
        """Have it answer only us until `open_again`, whatever becomes of the row."""
        self._closed = True
        self.hold()

    def open_again(self) -> None:
        """Have it answer users again, unless it is quarantined."""
        self._closed = False
        self.reload_row()

    async def wait_confirmed(self) -> bool:
        """Wait until it is closed, or open, where it runs. False: it is `lost` until its machine
        confirms it.
        """
        if self.process is None:
            return True
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                await self.process.settled()
        except TimeoutError:
            self.lost = self.reason = "its machine does not say whether it is closed to users"
            self._context.changed()
            return False
        return True

    def reload_row(self, row: ServerRow | None = None) -> None:
        """Take over what another process wrote to the state file (`row`, if already read)."""
        self._row = row or self._context.state.server(self.name)
        if self.phase is Phase.UP and not self._row.quarantine and not self._closed:
            self._release()
        self._context.changed()

    def begin_probe(self) -> int:
        """The number of a probe, for `observe`."""
        self._probes += 1
        return self._probes

    def observe(self, *, paused: bool, probe: int | None = None) -> None:
        """Record what a verb or a probe saw: whether the server is paused. A probe does not count
        once a verb or a later probe did: it may have seen a pause that has ended since."""
        probe = self.begin_probe() if probe is None else probe
        if probe < self._observed:
            return
        self._observed = probe
        if paused != self.observed_paused:
            self.observed_paused = paused
            self._context.changed()

    def note_state(self) -> None:
        """Record the time of the last change of `state`; call it after any change."""
        if self.state != self._shown:
            self._shown, self.state_since = self.state, time.time()

    # --- the life of a server ------------------------------------------------------------------

    async def _one_life(self, adopted: ChildProcess | None) -> str:
        """One life, from spawn to death; returns why it died."""
        while not adopted and (reason := self._context.asleep_because()):
            self._to(Phase.ASLEEP, reason)
            await asyncio.sleep(READY_POLL_S)
        self._to(Phase.STARTING if adopted else Phase.WAITING)
        async with contextlib.nullcontext() if adopted else self._context.gate(self.spec):
            self.process = self._adopt(adopted) if adopted else self._spawn_server()
            self._to(Phase.STARTING, self.reason)
            if reason := await self._until_ready(self.process):
                return reason
        if self._record.phase != "ready":
            self._save(replace(self._record, phase="ready"))
        self.process.record_segments()  # its ranks have met: after a crash it may be too late
        reached("server.ready")
        if not adopted:  # what it has loaded is known if the files did not change meanwhile
            now = await asyncio.to_thread(files_of, self.spec.base)
            self.launched = now.unless_changed(self.launched)
            shards = self.launched.shards if self.launched else ""
            self._context.state.expected.launched(self.name, shards)
        self._to(Phase.ADMITTING)
        while True:
            if reason := await self._unless_dead(self.process, self._context.admit(self)):
                return reason
            if self._context.admitted(self):
                if not self._row.quarantine:
                    self._release()
                if reason := await self._unless_dead(self.process, self.wait_confirmed()):
                    return reason
                if not self.intent_changed:  # by a verb while its machine confirmed it
                    break
        self._worth_restarting = True
        self._event("ready", FleetEvent.REPLICA_READY)
        self._to(Phase.UP, self.lost)
        return await self._watch(self.process)

    def _spawn_server(self) -> ChildProcess:
        engine = ENGINES[self.spec.engine]
        hold = {engine.variables.closed: str(self._context.paths.hold_file(self.name))}
        env = self._context.credentials.fill(self.spec.env, engine.variables.key)
        # SGLang's first requests are to itself, at its own address
        return self._spawn(self.spec.argv, bypassing({**env, **hold}, [self.spec.host]))

    def _before_spawn(self) -> None:
        self.forget_weights()
        self.reached_by_push, self.resume_when_up, self.asleep = "", False, False
        self.launched, self.compared = files_of(self.spec.base), False
        self._context.state.expected.launched(self.name, "")
        self._after_end()
        record_server(self._context.state, self.name, {})
        self.hold()

    def _release(self) -> None:
        hold_file = self._context.paths.hold_file(self.name)
        if hold_file.exists():  # on a read-only disk even an unlink of a missing file fails
            hold_file.unlink(missing_ok=True)

    def _after_end(self) -> None:
        self.observed_paused, self.in_push, self.lost = None, False, ""
        self._placed = None

    async def _until_ready(self, process: ChildProcess) -> str:
        """Wait until the server is ready; returns "", or why it never was."""
        policy, began = self.config.health, time.monotonic()
        patience_s = policy.startup_timeout_s
        if self.adopted and self.started_at is not None:
            # a server that has been up for long and does not answer is stuck, not starting
            patience_s = max(_ADOPTED_TIMEOUT_S, patience_s - (time.time() - self.started_at))
        while not process.exited.is_set():
            self._record_descendants(process)
            # checked first: a foreign process that took the port must not receive our token
            ours, paused = self._takes_place(process), None
            ours = ours and process.listens_at(self.spec.port)
            if ours:
                paused = await probe_ready(self._context.client, self.target, policy.timeout_s)
            if paused is not None:
                self.observed_paused = paused
                return ""
            waited_s = time.monotonic() - began
            # vLLM closes its port when its engine has died, and may then not exit
            closed = self._record.phase == "ready" and not ours
            if closed and waited_s > _ADOPTED_TIMEOUT_S and not await process.lost():
                return "it closed its port and did not end"
            if waited_s > patience_s:
                holder = None if ours else self.host.port_holder(self.spec.host, self.spec.port)
                note = f": another process answers at port {self.spec.port}" if holder else ""
                return f"not ready after {format_seconds(patience_s)}{note}"
            await _wait(process.exited, READY_POLL_S)
        return self._death(process)

    def _takes_place(self, process: ChildProcess) -> bool:
        """Whether its place is known."""
        if self.spec.port:
            return True
        if (place := process.place()) is None:
            return False
        where: dict[str, Any] = {"host": place.node.address, "port": place.port}
        where |= {"gpus": place.gpus}
        self._placed = replace(self.planned, **where, node=place.node)
        self._save(replace(self._record, **where))
        return True

    async def _watch(self, process: ChildProcess) -> str:
        """Probe until the server dies or stops answering; returns why."""
        policy = self.config.health
        failures = FailureCount(policy)
        while not await _wait(process.exited, policy.interval_s):
            self._record_descendants(process)
            # checked first: a probe of a lost machine says nothing about the server
            lost = await process.lost() if failures.next_decides else ""
            probe = self._context.client, self.target, policy.timeout_s
            tokens, number = asyncio.create_task(tokens_computed(*probe)), self.begin_probe()
            try:
                paused = await probe_alive(*probe)
            except ServerError as error:
                computed = await tokens if isinstance(error, DeadlineExceeded) else -1
                if verdict := await self._missed(process, failures, error, lost, computed):
                    return verdict
                continue
            finally:
                tokens.cancel()
            failures.succeeded()
            if cut := await self._cut(process):
                self.lost = cut
            elif self.lost and await self.wait_confirmed():
                self.lost = ""
            self._note_failures(failures)
            self.observe(paused=paused, probe=number)
        return self._death(process)

    async def _missed(
        self,
        process: ChildProcess,
        failures: FailureCount,
        error: ServerError,
        lost: str,
        tokens: int,
    ) -> str:
        """Take note of a failed probe; returns why the server counts as dead, or ""."""
        wait = ""
        # a push may block the engine for as long as its own deadlines allow
        busy = self.in_push or self.rehearsing
        if not busy and (verdict := failures.failed(error, tokens)):
            self.lost = lost or await process.lost()
            if process.exited.is_set():
                return self._death(process)
            # what all suffer from, a loaded machine above all, must not end all of them
            if not self.lost and not (wait := self._context.unanswering(self)):
                return verdict
        elif not busy and isinstance(error, ServerUnreachable):
            # two ways to it are gone: no request would get there either
            self.lost = process.connection_lost()
        elif not busy and isinstance(error, DeadlineExceeded) and process.connection_lost():
            # so they are where packets are dropped; or it is slow, while a new one is being made
            self.lost = await process.lost() or self.lost
        self._note_failures(failures, f"; waits until {wait} is replaced" if wait else "")
        return ""

    async def _cut(self, process: ChildProcess) -> str:
        """Why a part of it cannot be asked, for longer than a new connection takes. The part that
        answers probes cannot tell: it hangs at the next request."""
        return await process.lost() if self.spec.followers and process.connection_lost() else ""

    def _note_failures(self, failures: FailureCount, more: str = "") -> None:
        reason = f"{failures.count} health probes in a row failed{more}" if failures.count else ""
        reason = self.lost or reason or (self.process.connection_lost() if self.process else "")
        if reason != self.reason:
            self.reason = reason
            self._context.changed()

    def _lifetime(self) -> str:
        return f" after {format_seconds(max(0.0, time.time() - (self.started_at or time.time())))}"

    def _record_descendants(self, process: ChildProcess) -> None:
        if process.record_descendants():
            self._save(replace(self._record, descendants=process.descendants))
        else:
            self._save_again()


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event is set within `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
