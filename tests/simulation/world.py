"""One schedule: everything that happens in it is decided by one seed."""

from __future__ import annotations

import asyncio
import gc
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from skyctl import kill_points
from skyctl.core.registry import FleetRef
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.push import server_facts
from skyctl.push.request import PushRequest
from skyctl.service.attached import AttachedFleet
from skyctl.store.paths import FleetPaths
from tests.simulation import checks, seams
from tests.simulation.disk import Checkpoints, Disk
from tests.simulation.engine import Engine, Frailty
from tests.simulation.kernel import Kernel, Process
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import Network, Weather
from tests.simulation.sender import Memory

KINDS = ("attached",)
FAULTS = (
    "kill-point",
    "kill-write",
    "kill-time",
    "kill-sender",
    "kill-guardian",
    "kill-server",
    "interrupt",
    "disk-full",
    "disk-failing",
    "network",
    "engine-fails",
    "engine-corrupts",
    "engine-sticks",
    "digest-fails",
    "verbs",
    "second-pusher",
    "recover-early",
    "overwrite",
)
_PATIENCE_S = 300.0
_PUSH_POINTS = (*kill_points.PUSH, "recover.begin")


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


_CONFIGS: dict[int, FleetConfig] = {}


def _config(servers: int) -> FleetConfig:
    if servers not in _CONFIGS:
        urls = [f"http://127.0.0.1:{9000 + n}" for n in range(servers)]
        _CONFIGS[servers] = FleetConfig.model_validate(
            {
                "name": "sim",
                "servers": urls,
                "control_timeout_s": 10.0,
                "weight_transfer": {"chunk_size": 64, "update_timeout_s": 30.0},
            }
        )
    return _CONFIGS[servers]


class World:
    """A machine with servers, a disk, a network, and people who type."""

    def __init__(self, schedule: Schedule, home: Path, *, tracing: bool = False) -> None:
        self.schedule = schedule
        self.dice = Random(schedule.seed)
        self.tracing = tracing
        self.trace: list[str] = []
        self.digest = 0
        self.violations: list[str] = []
        self.loop = VirtualLoop(lambda: self.dice.random() * 0.004)
        self.kernel = Kernel(self.loop, self.dice, self.tell)
        self.network = Network(self.loop, self.kernel, self.dice)
        self.disk = Disk(self.kernel, self.dice)
        self.frailty = Frailty()
        self.memories: dict[int, Memory] = {}
        self.flocks: dict[int, tuple[int, Process]] = {}
        self.home = home
        self.checkpoints = Checkpoints(home)
        self.labels: dict[str, int] = {"default": 0}
        self.chaos = True
        self.verbs_open = 0  # that nobody has on record: they died, or their disk failed
        self.pushes = self.succeeded = 0
        self.commands: list[Process] = []
        dice = self.dice
        self.faults = self._choose_faults()
        count = dice.choice((1, 2, 2, 2, 3))
        ranks = dice.choice((1, 1, 1, 2))
        base = self.checkpoints.write("base", 0)
        values = self.checkpoints.values(0)
        self.engines = [
            Engine(
                f"sim-{n}",
                f"http://127.0.0.1:{9000 + n}",
                base,
                values,
                ranks=ranks,
                loop=self.loop,
                kernel=self.kernel,
                dice=dice,
                frailty=self.frailty,
                memories=self.memories,
                watch=self._watch,
                lone=self._lone,
            )
            for n in range(count)
        ]
        for engine in self.engines:
            self.network.serve(engine.url, engine)
            engine.start(self.kernel.spawn(f"server {engine.name}", None))
        self.ref = FleetRef("sim", FleetPaths(home, "sim"), _config(count), home, None)
        self.ref.paths.logs.mkdir(parents=True, exist_ok=True)
        server_facts._makes.clear()

    def _choose_faults(self) -> frozenset[str]:
        """Swarm testing: a random subset, so that faults do not hide each other."""
        share = self.dice.choice((0.1, 0.2, 0.35, 0.5))
        chosen = {fault for fault in FAULTS if self.dice.random() < share}
        if self.schedule.only is not None:
            chosen &= self.schedule.only
        return frozenset(chosen - self.schedule.without)

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
            self.violate(f"{found} after {_plain(what)}")

    def _lone(self, engine: Engine, path: str, caller: Process | None) -> None:
        """While a session is open, only its owner acts on the server."""
        owner = engine.owner
        if engine.open and owner is not None and not owner.dead and owner is not caller:
            who = caller.label if caller else "?"
            self.violate(f"one holder: {path} of {_plain(who)} into {_plain(owner.label)}'s session")

    # --- processes ------------------------------------------------------------------------------

    def guard(self, guardian: Process, pusher: Process, released: list[bool]) -> None:
        """Make `guardian` run a recovery when `pusher` dies unreleased."""

        def died() -> None:
            if released[0] or guardian.dead:
                return
            self.loop.call_later(0.3 + self.dice.random() * 0.7, recover, context=guardian.context)

        def recover() -> None:
            self.kernel.kill(guardian, "becomes a recovery")
            process = self.command("guardian's recover", self._recover)
            if "kill-guardian" in self.faults and self.chaos and self.dice.random() < 0.5:
                self._doom(process)

        pusher.on_death.append(died)

    def command(self, label: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        process = self.kernel.spawn(label, main)
        self.commands.append(process)
        return process

    async def _fleet(self, use: Callable[[AttachedFleet], Awaitable[Any]]) -> Any:
        try:
            async with AttachedFleet(self.ref) as fleet:
                return await use(fleet)
        except SkyctlError as error:
            self.tell(f"{type(error).__name__}: {error.message}")
            raise

    async def _recover(self) -> Any:
        async def use(fleet: AttachedFleet) -> Any:
            findings = await fleet.findings()
            for one in findings:
                self.tell(f"finds {one.server} {one.found} ({one.detail}): {one.action}")
            if all(one.action == "nothing" for one in findings):
                return findings
            done = await fleet.recover(900.0)
            for row in done:
                self.tell(f"recovered {row.server} {row.action} {row.ok} {row.detail}")
            return done

        return await self._fleet(use)

    async def _sync(self, request: PushRequest, number: int) -> Any:
        async def use(fleet: AttachedFleet) -> Any:
            job_id = await fleet.start_push(request)
            self.pushes += 1
            job = await fleet.wait_job(job_id)
            self.tell(f"{job_id} {job.state} {job.error and job.error['message']}")
            if job.state == "succeeded":
                self.succeeded += 1
                checks.push_succeeded(self, job, number)
            return job

        return await self._fleet(use)

    async def _verb(self, verb: str, *arguments: Any) -> Any:
        async def use(fleet: AttachedFleet) -> Any:
            self.verbs_open += 1
            outcomes = await getattr(fleet, verb)(*arguments)
            if fleet._state.unrecorded is None:  # else it says so, and nobody remembers
                self.verbs_open -= 1
            self.tell(f"{verb}: {[(o['server'], o['status']) for o in outcomes]}")
            return outcomes

        return await self._fleet(use)

    async def _status(self) -> Any:
        return await self._fleet(lambda fleet: fleet.status())

    # --- what happens ---------------------------------------------------------------------------

    def _doom(self, process: Process, *, push: bool = False) -> None:
        """Decide how this process dies, if it does."""
        dice, faults = self.dice, self.faults
        ways = [w for w in ("kill-point", "kill-write", "kill-time", "interrupt") if w in faults]
        if not ways or dice.random() < 0.25:
            return
        way = dice.choice(ways)
        if way == "kill-point":
            process.doomed |= {"point": dice.choice(_PUSH_POINTS), "passes": dice.choice((0, 0, 1))}
        elif way == "kill-write":
            process.doomed["writes"] = dice.randrange(60)
        elif way == "kill-time":
            self.loop.call_later(dice.random() * 2.5, self.kernel.kill, process)
        elif push:
            self.loop.call_later(dice.random() * 2.5, self._interrupt, process)

    def _interrupt(self, process: Process) -> None:
        """Ctrl-C: what asyncio.run does."""
        if not process.dead and process.tasks:
            self.tell(f"{process}: Ctrl-C")
            process.tasks[0].cancel()

    async def _train(self, name: str) -> None:
        """A trainer: writes a version over the one before, and pushes it."""
        dice = self.dice
        for _ in range(dice.choice((1, 2, 2, 3))):
            await asyncio.sleep(dice.random() * 2.0)
            number = self._version()
            directory = name if dice.random() < 0.8 else f"step-{number}"
            path = self.checkpoints.write(directory, number)
            label = f"v{number}" if dice.random() < 0.6 else None
            if label is not None:
                self.labels[label] = number
            request = PushRequest(
                checkpoint=path,
                transport="auto",
                weight_version=label,
                pause_mode=dice.choice(("keep", "keep", "wait", "abort")),
            )
            process = self.command(f"push of {number}", lambda r=request, n=number: self._sync(r, n))
            self._doom(process, push=True)
            if "kill-sender" in self.faults and dice.random() < 0.5:
                self.loop.call_later(dice.random() * 2.0, self._kill_sender)
            if "overwrite" in self.faults and dice.random() < 0.4:
                self.loop.call_later(dice.random() * 1.5, self._overwrite, directory)
            while not process.dead:
                await asyncio.sleep(0.1)
            if process.error is None and process.code is None:  # killed: it is started again
                await asyncio.sleep(dice.random() * 3.0)

    def _version(self) -> int:
        return max(self.checkpoints.digests) + 1

    def _overwrite(self, directory: str) -> None:
        """A careless trainer writes on while its push reads."""
        number = self._version()
        self.tell(f"{directory} is overwritten with {number}")
        self.checkpoints.write(directory, number)

    def _kill_sender(self) -> None:
        for process in list(self.kernel.processes.values()):
            if process.label == "sender" and not process.dead:
                self.kernel.kill(process)

    async def _type(self) -> None:
        """A second terminal."""
        dice = self.dice
        for _ in range(dice.randint(1, 5)):
            await asyncio.sleep(dice.random() * 3.0)
            typed = dice.choice(
                (
                    ("pause", "keep", False),
                    ("pause", "abort"),
                    ("pause", "wait"),
                    ("resume",),
                    ("resume",),
                    ("resume",),
                    ("sleep", 1),
                    ("wake",),
                    ("wake", ("weights",)),
                    ("status",),
                    ("recover",),
                )
            )
            if typed[0] == "recover":
                process = self.command("recover", self._recover)
            elif typed[0] == "status":
                process = self.command("status", self._status)
            else:
                process = self.command(typed[0], lambda t=typed: self._verb(*t))
            if dice.random() < 0.2:
                self._doom(process)

    async def _break_servers(self) -> None:
        dice = self.dice
        for _ in range(dice.choice((1, 1, 2))):
            await asyncio.sleep(dice.random() * 6.0)
            engine = dice.choice(self.engines)
            assert engine.process is not None
            self.kernel.kill(engine.process)
            await asyncio.sleep(dice.random() * 10.0)
            engine.start(self.kernel.spawn(f"server {engine.name}", None))

    async def _break_disk(self) -> None:
        dice, disk = self.dice, self.disk
        for _ in range(dice.choice((1, 2))):
            await asyncio.sleep(dice.random() * 4.0)
            if "disk-full" in self.faults:
                disk.full = True
            if "disk-failing" in self.faults:
                disk.failing = dice.choice((0.05, 0.3))
            self.tell("the disk is not well")
            await asyncio.sleep(dice.random() * dice.choice((0.3, 2.0, 8.0)))
            self._heal_disk()

    def _heal_disk(self) -> None:
        self.tell("the disk is well")
        self.disk.full, self.disk.failing = False, 0.0

    async def _break_network(self) -> None:
        dice, weather = self.dice, self.network.weather
        for _ in range(dice.choice((1, 2, 3))):
            await asyncio.sleep(dice.random() * 3.0)
            for name in ("refused", "reset_before", "lost_answer", "reset_after"):
                if dice.random() < 0.5:
                    setattr(weather, name, dice.choice((0.02, 0.1)))
            weather.slow = dice.choice((0.02, 0.2))
            await asyncio.sleep(dice.random() * 4.0)
            self.network.weather = weather = Weather()

    def _people(self) -> list[Coroutine[Any, Any, None]]:
        faults = self.faults
        found = [self._train("latest")]
        if "second-pusher" in faults:
            found.append(self._train("latest" if self.dice.random() < 0.3 else "other"))
        if faults & {"verbs", "recover-early"}:
            found.append(self._type())
        if "kill-server" in faults:
            found.append(self._break_servers())
        if faults & {"disk-full", "disk-failing"}:
            found.append(self._break_disk())
        if "network" in faults:
            found.append(self._break_network())
        return found

    def run(self) -> Ended:
        """Play it to its end and look."""
        dice, faults, frailty = self.dice, self.faults, self.frailty
        if "engine-fails" in faults:
            frailty.update_fails = dice.choice((0.02, 0.1, 0.3))
        if "engine-corrupts" in faults:
            frailty.corrupts = dice.choice((0.02, 0.1))
        if "digest-fails" in faults:
            frailty.digest_fails = dice.choice((0.1, 0.5))
        if "engine-sticks" in faults:
            frailty.sticks = dice.choice((0.002, 0.02))
        self.tell(f"faults: {', '.join(sorted(faults))}; {len(self.engines)} servers")
        people = [self.loop.create_task(one) for one in self._people()]
        self.loop.run_until(120.0, lambda: all(task.done() for task in people))
        for task in people:
            task.cancel()
        self.loop.run_until(self.loop.now + 0.5)
        self._settle()
        return Ended(
            self.schedule.seed,
            self.violations,
            self.digest,
            self.loop.steps,
            tuple(sorted(faults)),
            self.trace,
            self.pushes,
            self.succeeded,
        )

    def _settle(self) -> None:
        """No more faults; whoever still works ends; then an operator recovers what is left."""
        self.chaos = False
        self._heal_disk()
        self.network.weather = Weather()
        self.frailty.update_fails = self.frailty.corrupts = 0.0
        self.frailty.digest_fails = self.frailty.sticks = 0.0
        for process in self.commands:
            process.doomed.clear()
        for engine in self.engines:
            if engine.process is None or engine.process.dead:
                engine.start(self.kernel.spawn(f"server {engine.name}", None))
        self._until_quiet("commands")
        self.loop.run_until(self.loop.now + 20.0)
        self._until_quiet("guardians")
        self.tell("the operator recovers")
        last = self.command("last recover", self._recover)
        self._until_quiet("the last recover")
        checks.at_the_end(self, last)

    def _until_quiet(self, what: str) -> None:
        def quiet() -> bool:
            return all(process.dead for process in self.commands)

        self.loop.run_until(self.loop.now + _PATIENCE_S, quiet)
        for process in self.commands:
            if not process.dead:
                self.violate(f"hangs: {_plain(process.label)} does not end ({what})")
                self.kernel.kill(process, "is killed: nobody waits that long")

    def close(self) -> None:
        """Let go of everything; what dead processes left unfinished unwinds into nothing."""
        for process in self.kernel.processes.values():
            self.kernel.kill(process, "is over")
        self.disk.close()
        self.kernel.processes.clear()


def _plain(text: str) -> str:
    """Without pids, so that alike violations read alike."""
    import re

    return re.sub(r"\[\d+\]|\b\d+\b", "#", text)


def play(schedule: Schedule, home: Path, *, tracing: bool = False) -> Ended:
    """One schedule from its start to its end, inside `seams.installed()`."""
    gc.disable()  # what is collected runs code: only between schedules
    world = World(schedule, home, tracing=tracing)
    seams.enter(world)
    try:
        return world.run()
    finally:
        world.close()
        seams.enter(None)
        del world
        gc.collect()
