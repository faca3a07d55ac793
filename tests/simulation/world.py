"""One schedule: everything that happens in it is decided by one seed."""

from __future__ import annotations

import gc
import re
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from skyctl.core.registry import FleetRef
from skyctl.core.service import Control, Recover
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.push import server_facts
from skyctl.push.request import PushRequest
from skyctl.service import connect
from skyctl.store.paths import FleetPaths
from tests.simulation import checks, people, seams
from tests.simulation.disk import Checkpoints, Disk
from tests.simulation.engine import Engine, Frailty
from tests.simulation.kernel import Kernel, Process
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Network, Weather
from tests.simulation.sender import Memory

Fleet = Any  # one by its supervisor, or one by URL
KINDS = ("attached", "supervised")

_BEGINNING_S = 120.0
_PATIENCE_S = 300.0
_QUIET_S = 20.0


@dataclass
class Schedule:
    """What a seed comes to. `without`: faults that shrinking took out again."""

    seed: int
    kind: str = "attached"
    without: frozenset[str] = frozenset()
    only: frozenset[str] | None = None


@dataclass
class Ended:
    """How a schedule ended. `trace` is empty unless it was asked for."""

    seed: int
    violations: list[str]
    digest: int
    steps: int
    faults: tuple[str, ...]
    trace: list[str] = field(default_factory=list)
    pushes: int = 0
    succeeded: int = 0


class World:
    """A machine with servers, a disk, a network, and people who type: an attached fleet.

    `supervised.SupervisedWorld` is one whose servers skyctl starts.
    """

    supervised = False
    faults_known: tuple[str, ...] = people.FAULTS

    def __init__(self, schedule: Schedule, home: Path, *, tracing: bool = False) -> None:
        self.schedule = schedule
        self.dice = dice = Random(schedule.seed)
        self.tracing = tracing
        self.trace: list[str] = []
        self.digest = 0
        self.violations: list[str] = []
        self.loop = VirtualLoop(lambda: self.dice.random() * 0.004)
        self.kernel = Kernel(self.loop, dice, self.tell)
        self.network = Network(self.loop, dice)
        self.disk = Disk(self.kernel, dice)
        self.frailty = Frailty()
        self.memories: dict[int, Memory] = {}
        self.flocks: dict[int, tuple[int, Process]] = {}
        self.home = home
        self.checkpoints = Checkpoints(home)
        self.labels: dict[str, set[int]] = {"default": {0}}
        self.chaos = True
        self.verbs_open = 0  # that nobody has on record: they died, or their disk failed
        self.pushes = self.succeeded = 0
        self.commands: list[Process] = []
        self.faults = self._choose_faults()
        self.base = self.checkpoints.write("base", 0)
        self.engines = self._make_engines(dice.choice((1, 2, 2, 2, 3)), dice.choice((1, 1, 1, 2)))
        self.ref = FleetRef(
            "sim", FleetPaths(home, "sim"), self._config(len(self.engines)), home, None
        )
        self.ref.paths.logs.mkdir(parents=True, exist_ok=True)
        for lock in self.ref.paths.directory.glob("*.lock"):  # with what a schedule before left
            lock.unlink()
        server_facts._makes.clear()

    def _choose_faults(self) -> frozenset[str]:
        """Swarm testing: a random subset, so that faults do not hide each other."""
        share = self.dice.choice((0.1, 0.2, 0.35, 0.5))
        chosen = {fault for fault in self.faults_known if self.dice.random() < share}
        if self.schedule.only is not None:
            chosen &= self.schedule.only
        return frozenset(chosen - self.schedule.without)

    def _make_engines(self, count: int, ranks: int) -> list[Engine]:
        engines = [
            Engine(
                f"sim-{n}",
                f"http://127.0.0.1:{9000 + n}",
                self.base,
                self.checkpoints.values(0),
                ranks=ranks,
                loop=self.loop,
                kernel=self.kernel,
                dice=self.dice,
                frailty=self.frailty,
                memories=self.memories,
                contents=self.checkpoints.bytes_of,
                watch=self._watch,
                lone=self._lone,
            )
            for n in range(count)
        ]
        for engine in engines:
            self.network.serve(engine.url, engine)
        return engines

    def _config(self, servers: int) -> FleetConfig:
        urls = tuple(f"http://127.0.0.1:{9000 + n}" for n in range(servers))
        return configured(servers=urls)

    # --- telling and checking -------------------------------------------------------------------

    def tell(self, line: str) -> None:
        self.digest = zlib.crc32(f"{self.loop.now:.9f} {line}".encode(), self.digest)
        if self.tracing:
            self.trace.append(f"{self.loop.now:10.4f}  {line}")

    def violate(self, line: str) -> None:
        self.tell(f"VIOLATION {line}")
        if line not in self.violations:
            self.violations.append(line)

    def _watch(self, engine: Engine, what: str) -> None:
        self.tell(f"{engine.name}: {what}")
        if found := checks.serves(self, engine):
            self.violate(f"{found} after {plain(what)}")

    def _lone(self, engine: Engine, path: str, caller: Process | None) -> None:
        """While a session is open, and its owner has the turn, nobody else acts on the server."""
        owner = engine.owner
        if owner is None or owner.dead or owner is caller or not engine.open:
            return
        if any(process is owner for _, process in self.flocks.values()):
            who = plain(caller.label) if caller else "?"
            self.violate(f"one holder: {path} of {who} into {plain(owner.label)}'s session")

    # --- processes ------------------------------------------------------------------------------

    def guard(self, guardian: Process, pusher: Process, released: list[bool]) -> None:
        """Make `guardian` run a recovery when `pusher` dies unreleased."""

        def died() -> None:
            if released[0] or guardian.dead:
                return
            self.loop.call_later(0.3 + self.dice.random() * 0.7, recover, context=guardian.context)

        def recover() -> None:
            self.kernel.kill(guardian, "becomes a recovery")
            process = self._command("guardian's recover", self._recover)
            if "kill-guardian" in self.faults and self.chaos and self.dice.random() < 0.5:
                people.doom(self, process)

        pusher.on_death.append(died)

    def push(self, request: PushRequest, number: int) -> Process:
        """Somebody types `sync-weights` for a directory that holds version `number`."""
        return self._command(f"push of {number}", lambda: self._sync(request, number))

    def type(self, typed: str | Control) -> Process:
        """Somebody types this."""
        if isinstance(typed, Control):
            return self._command(typed.verb, lambda: self._verb(typed))
        own = {"recover": self._recover, "status": self._status, **self._operations()}
        return self._command(typed, own[typed])

    def _operations(self) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
        return {}

    def _command(self, label: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        async def run() -> Any:
            try:
                return await main()
            except SkyctlError as error:
                self.tell(f"{type(error).__name__}: {error.message}")
                raise
            except Exception as error:
                self.violate(
                    f"bug: {label.split()[0]}: {type(error).__name__} {plain(str(error))[:120]}"
                )
                raise

        process = self.kernel.spawn(label, run)
        self.commands.append(process)
        return process

    async def _fleet(self, use: Callable[[Fleet], Awaitable[Any]]) -> Any:
        async with connect(self.ref) as fleet:
            return await use(fleet)

    async def _recover(self) -> Any:
        async def find(fleet: Fleet) -> Any:
            return await fleet.findings()

        async def recover(fleet: Fleet) -> Any:
            return await fleet.recover(Recover(900.0))

        findings = await self._fleet(find)
        for one in findings:
            self.tell(f"finds {one.server} {one.found} ({one.detail}): {one.action}")
        if all(one.action == "nothing" for one in findings):
            return ()
        done = await self._fleet(recover)
        for row in done:
            self.tell(f"recovered {row.server} {row.action} {row.ok} {row.detail}")
        return done

    async def _sync(self, request: PushRequest, number: int) -> Any:
        async def use(fleet: Fleet) -> Any:
            job_id = await fleet.start_push(request)
            self.pushes += 1
            job = await fleet.wait_job(job_id)
            self.tell(f"{job_id} {job.state} {job.error and job.error['message']}")
            if job.state == "succeeded":
                self.succeeded += 1
                checks.push_succeeded(self, job, number)
            return job

        return await self._fleet(use)

    async def _verb(self, asked: Control) -> Any:
        async def use(fleet: Fleet) -> Any:
            self.verbs_open += 1
            outcomes = await fleet.control(asked)
            told = all(one.status in ("ok", "skipped", "rolled-back") for one in outcomes)
            if told and self._on_record(fleet):
                self.verbs_open -= 1
            self.tell(f"{asked.verb}: {[(o.server, o.status, o.detail) for o in outcomes]}")
            return outcomes

        return await self._fleet(use)

    def _on_record(self, fleet: Any) -> bool:
        return bool(fleet.state.unrecorded is None)

    async def _status(self) -> Any:
        return await self._fleet(lambda fleet: fleet.status())

    # --- from the beginning to the end ----------------------------------------------------------

    def run(self) -> Ended:
        """Play it to its end and look."""
        self._begin()
        people.weaken(self)
        self.tell(f"faults: {', '.join(sorted(self.faults))}; {len(self.engines)} servers")
        tasks = [self.loop.create_task(one) for one in people.all_of(self)]
        busy = set(tasks)
        for task in tasks:
            task.add_done_callback(busy.discard)
        self.loop.run_until(self.loop.now + _BEGINNING_S, lambda: not busy)
        for task in tasks:
            task.cancel()
        self.loop.run_until(self.loop.now + 0.5)
        self._settle()
        return Ended(
            self.schedule.seed,
            list(self.violations),
            self.digest,
            self.loop.steps,
            tuple(sorted(self.faults)),
            self.trace,
            self.pushes,
            self.succeeded,
        )

    def _begin(self) -> None:
        """The servers run before anybody attaches them."""
        for engine in self.engines:
            engine.start(self.kernel.spawn(f"server {engine.name}", None))

    def _settle(self) -> None:
        """No more faults; whoever still works ends; then an operator recovers what is left."""
        self.chaos = False
        people.heal_disk(self)
        self.network.weather = Weather()
        frailty = self.frailty
        frailty.update_fails = frailty.corrupts = frailty.digest_fails = frailty.sticks = 0.0
        for process in self.kernel.processes.values():
            process.doomed.clear()
        self._restart_servers()
        self._until_quiet("commands")
        self.loop.run_until(self.loop.now + _QUIET_S)
        self._until_quiet("guardians")
        self.tell("the operator recovers")
        last = self._command("last recover", self._recover)
        self._until_quiet("the last recover")
        checks.at_the_end(self, last)

    def _restart_servers(self) -> None:
        for engine in self.engines:
            if engine.process is None or engine.process.dead:
                engine.start(self.kernel.spawn(f"server {engine.name}", None))

    def _until_quiet(self, what: str) -> None:
        def quiet() -> bool:
            return all(process.dead for process in self.commands) and not self._at_work()

        self.loop.run_until(self.loop.now + _PATIENCE_S, quiet)
        if self._at_work():
            self.violate(f"hangs: the supervisor is at work for ever ({what})")
        for process in self.commands:
            if not process.dead:
                self.violate(f"hangs: {plain(process.label)} does not end ({what})")
                self.kernel.kill(process, "is killed: nobody waits that long")

    def is_down(self) -> bool:
        """Whether nothing of the fleet lives, so that nothing is to be put right."""
        return False

    def check_routing(self) -> None:
        """At the end: whoever is routed serves, and whoever serves is routed."""

    def _at_work(self) -> bool:
        """Whether something goes on that nobody waits for."""
        return False

    def close(self) -> None:
        """Let go of everything; what dead processes left unfinished unwinds into nothing."""
        for process in self.kernel.processes.values():
            self.kernel.kill(process, "is over")
        self.tracing = False  # what unwinds from here on is no step of it
        self.disk.close()

    def forget(self) -> None:
        """Unwind what is left, so that little is to be collected."""
        self.kernel.forget()
        self.loop.forget()


_CONFIGS: dict[str, FleetConfig] = {}


def configured(**fields: Any) -> FleetConfig:
    """A fleet file; validated once, and not for every schedule."""
    key = repr(sorted(fields.items()))
    if key not in _CONFIGS:
        _CONFIGS[key] = FleetConfig.model_validate(
            {
                "name": "sim",
                "control_timeout_s": 10.0,
                "weight_transfer": {"chunk_size": 64, "update_timeout_s": 30.0},
                **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()},
            }
        )
    return _CONFIGS[key]


def plain(text: str) -> str:
    """Without numbers of processes and versions, so that alike violations read alike."""
    return re.sub(r"\[\d+\]|\b\d+\b", "#", text)


def play(schedule: Schedule, home: Path, *, tracing: bool = False) -> Ended:
    """One schedule from its start to its end, inside `seams.installed()`."""
    from tests.simulation.supervised import SupervisedWorld

    gc.disable()  # what is collected runs code: only between schedules
    kind = SupervisedWorld if schedule.kind == "supervised" else World
    world = kind(schedule, home, tracing=tracing)
    seams.enter(world)
    try:
        return world.run()
    finally:
        world.close()
        seams.enter(None)
        world.forget()
        del world
        gc.collect()
