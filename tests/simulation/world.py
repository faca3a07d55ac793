"""One schedule: everything that happens in it is decided by one seed."""

from __future__ import annotations

import gc
import os
import re
import shutil
import zlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from skyctl.core.registry import FleetRef
from skyctl.core.requests import Control, Recover, Resume, Wake
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.push import server_facts
from skyctl.push.request import PushRequest
from skyctl.service import connect
from skyctl.store.paths import FleetPaths
from skyctl.store.server_names import name_servers
from skyctl.store.state import FleetState
from skyctl.store.stopped import STOPPED_S
from tests.simulation import checks, people, seams
from tests.simulation.disk import HUB, Checkpoints, Disk
from tests.simulation.engine import STRANGER, Engine, Frailty
from tests.simulation.kernel import Kernel, Process, current
from tests.simulation.loop import Endless, VirtualLoop
from tests.simulation.network import Network, Weather
from tests.simulation.sender import Memory
from tests.simulation.workers import Exports, Workers

Fleet = Any  # one by its supervisor, or one by URL
KINDS = ("attached", "supervised")

_BEGINNING_S = 120.0
_PATIENCE_S = 300.0
_QUIET_S = 20.0
_FREEZING, _THAWING = ("/pause", "/sleep"), ("/resume", "/wake_up")
_WRITING = ("/start_weight_update", "/update_weights", "/finish_weight_update")


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
    frozen: int = 0
    """How many times a server was frozen."""
    excused: int = 0
    """How many times a server was left out of a check on what it answers, or does not."""
    live: int = 0
    """How many pushes out of a trainer's memory succeeded."""


def traits(seed: int) -> frozenset[str]:
    """Which of these a schedule has; seeds without them go as they went before there were any."""
    sleeps = {people.SLEEPS} if Random(f"sleeps {seed}").random() < 0.25 else set()
    if Random(f"gpu {seed}").random() < 0.25:
        return frozenset({people.LIVE, people.GPU} | sleeps)
    return frozenset(({people.LIVE} if Random(f"live {seed}").random() < 0.25 else set()) | sleeps)


class World:
    """A machine with servers, a disk, a network, and people who type: an attached fleet.

    `supervised.SupervisedWorld` is one whose servers skyctl starts.
    """

    supervised = False
    faults_known: tuple[str, ...] = (*people.FAULTS, *people.ATTACHED_FAULTS)

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
        self.exports = Exports()
        self.home = home
        self.checkpoints = Checkpoints(home)
        self.labels: dict[str, set[int]] = {"default": {0}}
        self.chaos = True
        self.verbs_open = 0  # that nobody has on record: they died, or their disk failed
        self.recovered = False  # the operator has begun to recover the fleet
        self.refusals = 0  # by guards
        self.pushes = self.succeeded = self.frozen = self.excused = self.live = 0
        self.accepted: dict[int, Any] = {}  # the weights that a version came to
        self.commands: list[Process] = []
        self.written_at: dict[Process | None, float] = {}  # who last wrote to any server, and when
        self.faults = self._choose_faults()
        self.on_gpu = people.GPU in self.faults
        self.base = self.checkpoints.write("base", 0)
        self.engines = self._make_engines(dice.choice((1, 2, 2, 2, 3)), dice.choice((1, 1, 1, 2)))
        self.listed = list(self.engines)  # in the fleet file
        self.ref = self._fleet_of("sim")
        self.other = self._fleet_of("other") if "other-fleet" in self.faults else None
        self.others: set[str] = set()  # URLs of servers that the other fleet has labelled
        self.called = {engine.url: engine.name for engine in self.engines}  # as recorded
        server_facts._makes.clear()

    def _choose_faults(self) -> frozenset[str]:
        """Swarm testing: a random subset, so that faults do not hide each other."""
        share = self.dice.choice((0.1, 0.2, 0.35, 0.5))
        chosen = {fault for fault in self.faults_known if self.dice.random() < share}
        chosen |= traits(self.schedule.seed)
        if self.schedule.only is not None:
            chosen &= self.schedule.only
        return frozenset(chosen - self.schedule.without)

    def _make_engines(self, count: int, ranks: int) -> list[Engine]:
        scrubs = "engine-builds-on" not in self.faults
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
                checkpoints=self.checkpoints,
                watch=self._watch,
                before=self._before,
                scrubs=scrubs,
                guarded="guard" in self.faults,
            )
            for n in range(count)
        ]
        for engine in engines:
            self.network.serve(engine.url, engine)
            if self.on_gpu:
                engine.workers = Workers(engine, self)
        return engines

    def _fleet_of(self, name: str) -> FleetRef:
        paths = FleetPaths(self.home, name)
        paths.logs.mkdir(parents=True, exist_ok=True)
        paths.database.touch()  # its content is the disk's
        return FleetRef(name, paths, self._config(name), self.home, None)

    def _config(self, name: str) -> FleetConfig:
        token = "SKYCTL_SIMULATED_TOKEN" if "guard" in self.faults else None
        urls = tuple(engine.url for engine in self.listed)
        return configured(name=name, servers=urls, control_token_env=token)

    def edit_list(self, engines: Sequence[Engine]) -> None:
        """Somebody edits the fleet file."""
        self.tell(f"the fleet file lists {', '.join(engine.name for engine in engines)}")
        self.listed = list(engines)
        self.ref = replace(self.ref, loaded=self._config("sim"))

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
        self.refusals += what.startswith("refuses")
        if engine.serving and engine.loading_by is not None:
            engine.answered = True
        if engine.completed:
            engine.completed = False
            if not engine.damaged and self.checkpoints.number(engine.content) is None:
                self.violate("mixed: after a whole update, parts of another are left")
        if what.startswith("/update_weight_version"):
            if "elsewhere" in engine.label:
                self.others.add(engine.url)
            checks.labelled_anew(self, engine)
        if what.startswith("dies"):
            self._violate_unless(checks.unseen_sleep(self, engine), f"memory: {plain(what)}")
        elif found := checks.serves(self, engine):
            # nothing of ours stands in the way of either
            excused = checks.thawed_by_stranger(engine) or engine.meddled_with
            excused = excused or checks.started_again_unseen(engine)
            self._violate_unless(excused, f"{found} after {plain(what)}")

    def _violate_unless(self, excused: bool, line: str) -> None:
        if excused:
            self.excused += 1
        else:
            self.violate(line)

    def _before(self, engine: Engine, path: str, caller: Process | None) -> None:
        """While a session is open, and its owner has the turn, nobody else acts on the server."""
        if path in _FREEZING and engine.serving:
            self.frozen += self.chaos
            engine.frozen_for_push = (
                self._pushes(caller) and self._push_under_way() and not self._unrecorded(caller)
            )
            engine.thawed_by = None
        elif path in _THAWING:
            engine.thawed_by, engine.thawed_at = caller, self.loop.now
            if checks.thawed_by_stranger(engine):
                engine.meddled_at = self.loop.now
        if path in _WRITING:
            self.written_at[caller] = self.loop.now
        if path == "/start_weight_update":
            engine.loading_by, engine.answered, engine.unseen = caller, False, False
            engine.begun_at = self.loop.now
        elif path == "/finish_weight_update" and engine.open:
            engine.loaded_at = self.loop.now
            if not engine.next_chunk:
                engine.loading_by = None  # undone
        elif path == "/update_weight_version" or (path == "/resume" and self._pushes(caller)):
            if engine.loading_by is not None:
                engine.unseen = engine.loaded_at <= engine.looked_at < engine.meddled_at
            engine.loading_by = None
        owner = engine.owner
        if owner is None or owner.dead or owner is caller or not engine.open:
            return
        if caller is not None and caller.label == STRANGER and not engine.protected:
            return  # nothing of ours stands in its way
        if any(flock.process is owner for flock in self.kernel.flocks.values()):
            who = plain(caller.label) if caller else "?"
            self.violate(f"one holder: {path} of {who} into {plain(owner.label)}'s session")

    def _pushes(self, caller: Process | None) -> bool:
        """Whether this process pushes or recovers, and does not merely thaw."""
        return caller is not None and caller.label not in people.VERBS

    def _unrecorded(self, caller: Process | None) -> bool:
        """Whether a recovery acts that cannot write why: `status` says how to thaw the server."""
        recovers = caller is not None and "recover" in caller.label
        return recovers and (self.disk.full or self.disk.failing > 0)

    def _push_under_way(self) -> bool:
        return True

    # --- processes ------------------------------------------------------------------------------

    def guard(self, guardian: Process, pusher: Process, released: list[bool], fleet: str) -> None:
        """Make `guardian` run a recovery when `pusher` dies unreleased."""
        ref = self._ref_of(fleet)

        def died() -> None:
            if released[0] or guardian.dead:
                return
            if "kill-guardian" in self.faults and self.chaos and self.dice.random() < 0.3:
                self.kernel.kill(guardian)  # whatever killed the one killed the other
                return
            self.loop.call_later(0.1 + self.dice.random() * 0.9, recover, context=guardian.context)

        def recover() -> None:
            self.kernel.kill(guardian, "becomes a recovery")
            process = self._command("guardian's recover", lambda: self._recover(ref()))
            if "kill-guardian" in self.faults and self.chaos and self.dice.random() < 0.5:
                people.doom(self, process)

        def stopped() -> None:
            self.loop.call_later(STOPPED_S, look, context=guardian.context)

        def look() -> None:  # goes on, or was stopped again meanwhile: the real one counts looks
            if not (released[0] or guardian.dead):
                self.kernel.end_stopped(pusher.pid)

        pusher.on_death.append(died)
        pusher.on_stop.append(stopped)

    def _ref_of(self, fleet: str) -> Callable[[], FleetRef]:
        """The fleet of this name, as its file is when it is looked at."""

        def find() -> FleetRef:
            if fleet == self.ref.name:
                return self.ref
            assert self.other is not None
            return self.other

        return find

    def push(self, request: PushRequest, number: int, ref: FleetRef | None = None) -> Process:
        """Somebody types `sync-weights` for a directory that holds version `number`."""
        return self._command(f"push of {number}", lambda: self._sync(request, number, ref))

    def type(self, typed: str | Control, ref: FleetRef | None = None) -> Process:
        """Somebody types this, for the fleet of the schedule or the other one."""
        if isinstance(typed, Control):
            return self._command(typed.verb, lambda: self._verb(typed, ref))
        own = {
            "recover": lambda: self._recover(ref),
            "status": lambda: self._status(ref),
            **self._operations(),
        }
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

    async def _fleet(
        self, use: Callable[[Fleet], Awaitable[Any]], ref: FleetRef | None = None
    ) -> Any:
        async with connect(ref or self.ref) as fleet:
            return await use(fleet)

    async def _find(self, ref: FleetRef | None = None) -> Any:
        return await self._fleet(lambda fleet: fleet.findings(), ref)

    async def _recover(self, ref: FleetRef | None = None) -> Any:
        async def recover(fleet: Fleet) -> Any:
            return await fleet.recover(Recover(900.0))

        findings = await self._find(ref)
        for one in findings:
            self.tell(f"finds {one.server} {one.condition} ({one.detail}): {one.action}")
        if all(one.action == "nothing" for one in findings):
            return ()
        done = await self._fleet(recover, ref)
        for row in done:
            self.tell(f"recovered {row.server} {row.action} {row.ok} {row.detail}")
        return done

    async def _sync(self, request: PushRequest, number: int, ref: FleetRef | None = None) -> Any:
        async def use(fleet: Fleet) -> Any:
            job_id = await fleet.start_push(request)
            self.pushes += 1
            job = await fleet.wait_job(job_id)
            self.tell(f"{job_id} {job.state} {job.error and job.error['message']}")
            if job.state == "succeeded":
                self.succeeded += 1
                on_record = self._on_record(fleet)
                urls = {target.name: target.url for target in self._targets(fleet)}
                checks.push_succeeded(self, job, number, urls, on_record=on_record)
            checks.push_ended(self, job, self._pusher())
            return job

        return await self._fleet(use, ref)

    def _pusher(self) -> Process | None:
        """The process that acts on servers for the command that runs."""
        return current()

    def last_write_of(self, pusher: Process | None, ended: float) -> float:
        """When a push that ended then wrote to any server for the last time, at the latest."""
        return self.written_at.get(pusher, 0.0)

    @property
    def network_well(self) -> bool:
        """Whether every request is answered in time."""
        return not self.faults & {"network", "engine-sticks"}

    def _targets(self, fleet: Any) -> Sequence[Any]:
        return tuple(fleet.targets)

    async def _verb(self, asked: Control, ref: FleetRef | None = None) -> Any:
        async def use(fleet: Fleet) -> Any:
            self.verbs_open += 1
            outcomes = await fleet.control(asked)
            told = all(one.status in ("ok", "skipped", "rolled-back") for one in outcomes)
            if told and self._on_record(fleet):
                self.verbs_open -= 1
            self.tell(f"{asked.verb}: {[(o.server, o.status, o.detail) for o in outcomes]}")
            return outcomes

        return await self._fleet(use, ref)

    def _on_record(self, fleet: Any) -> bool:
        return bool(fleet.state.unrecorded is None)

    async def _status(self, ref: FleetRef | None = None) -> Any:
        return await self._fleet(lambda fleet: fleet.status(), ref)

    # --- from the beginning to the end ----------------------------------------------------------

    def run(self) -> Ended:
        """Play it to its end and look."""
        try:
            self._play()
        except Endless:
            self.violate(f"hangs: it has not ended after {self.loop.steps - 1} steps")
        return Ended(
            self.schedule.seed,
            list(self.violations),
            self.digest,
            self.loop.steps,
            tuple(sorted(self.faults)),
            self.trace,
            self.pushes,
            self.succeeded,
            self.frozen,
            self.excused,
            self.live,
        )

    def _play(self) -> None:
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
        if "edited-list" in self.faults:
            self.edit_list(self.dice.sample(self.engines, len(self.engines)))
        self._restart_servers()
        for process in self.commands:
            if not self.kernel.locks(process):  # nobody ends it: in the end somebody types `fg`
                self.kernel.resume(process)
        self._until_quiet("commands")
        self.loop.run_until(self.loop.now + _QUIET_S)
        self._until_quiet("guardians")
        self.tell("the operator recovers")
        if self.other is not None:  # each repairs, and thaws, what is its own
            self._operate_elsewhere()
        self.recovered = True
        last = self._operate("last recover", self._recover)
        self.recovery_looked_at = {engine.url: engine.seen_at for engine in self.engines}
        self.recovery_found_stuck = {e.url for e in self.engines if e.busy_until > self.loop.now}
        found = self._operate("last look", self._find).result or ()
        checks.at_the_end(self, last, {one.server: one.explained for one in found})
        if not self.is_down():
            elsewhere = any("--fleet other" in one.detail for one in found)
            if elsewhere:
                self._operate_elsewhere(again=True)
            self._restart_quarantined({one.server for one in found if one.action != "nothing"})
            if elsewhere:  # either fleet may wait for the other
                self._operate("recover", self._recover)
                self._operate_elsewhere(again=True)
            self._operate_on()

    def _operate_elsewhere(self, *, again: bool = False) -> None:
        """The operator of the other fleet recovers it. `again`: types whatever else may help."""
        repairs = self._operate("recover", lambda: self._recover(self.other)).result or ()
        failed = [repair.server for repair in repairs if not repair.ok]
        if failed and again:
            for name in failed:
                self._start_again(self.engines[int(name.removeprefix("other-"))])
            self._operate("wake", lambda: self._verb(Wake(tags=("weights",)), self.other))
        if failed:
            self._push_whole("elsewhere", self.other)
        self._operate("wake", lambda: self._verb(Wake(), self.other))
        self._operate("resume", lambda: self._verb(Resume(), self.other))

    def _operate_on(self) -> None:
        """The operator types whatever may help, until each server serves."""
        refusals = self.refusals
        self._type_all()
        if self.refusals > refusals:  # which say that a freeze can be taken over
            self._operate("resume", lambda: self._verb(Resume(force=True)))
            self._type_all()
        checks.after_all(self)

    def _type_all(self) -> None:
        asleep = tuple(self.name_of(engine) for engine in self.engines if engine.asleep)
        if asleep:  # a push takes none that sleeps
            self._operate("wake", lambda: self._verb(Wake(servers=asleep, tags=("weights",))))
        self._push_whole("last")
        self._operate("wake", lambda: self._verb(Wake()))
        self._operate("resume", lambda: self._verb(Resume()))

    def _push_whole(self, name: str, ref: FleetRef | None = None) -> None:
        number = self.checkpoints.next_number()
        request = PushRequest(checkpoint=self.checkpoints.write(name, number))
        self._operate(f"push of {name}", lambda: self._sync(request, number, ref))

    def _operate(self, label: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        process = self._command(label, main)
        self._until_quiet(label)
        return process

    def _restart_quarantined(self, names: Collection[str]) -> None:
        """Whoever started them does, as `recover` says."""
        for engine in self.engines:
            if self.name_of(engine) in names:
                self._start_again(engine)

    def _start_again(self, engine: Engine) -> None:
        if engine.process is not None:
            self.kernel.kill(engine.process)
        self._restart_servers()

    def _restart_servers(self) -> None:
        for engine in self.engines:
            if engine.process is None or engine.process.dead:
                engine.start(self.kernel.spawn(f"server {engine.name}", None))

    def _until_quiet(self, what: str) -> None:
        def quiet() -> bool:
            for process in reversed(self.commands):  # the latest is the likeliest to go on
                if not (process.dead or process.stopped):
                    return False
            return not self._at_work()

        self.loop.run_until(self.loop.now + _PATIENCE_S, quiet)
        if self._at_work():
            self.violate(f"hangs: the supervisor is at work for ever ({what})")
        for process in self.commands:
            # one that is stopped does not end by itself: recovery ends it where it keeps others out
            waits = process.stopped and not (self.recovered and self.kernel.locks(process))
            if not process.dead and not waits:
                self.violate(f"hangs: {plain(process.label)} does not end ({what})")
                self.kernel.kill(process, "is killed: nobody waits that long")

    def name_of(self, engine: Engine) -> str:
        """What the fleet calls this server."""
        return self.called[engine.url]

    def engine_at(self, url: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.url == url), None)

    def note_names(self, state: FleetState) -> None:
        """As the fleet's next command will name them."""
        recorded = {row.name: row.url for row in state.servers()}
        naming = name_servers("sim", [("", engine.url) for engine in self.listed], recorded)
        self.called = {url: name for name, url in naming.servers}

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
    for entry in home.iterdir():  # of the schedule before: each goes the same way after any other
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    kind = SupervisedWorld if schedule.kind == "supervised" else World
    world = kind(schedule, home, tracing=tracing)
    seams.enter(world)
    before = os.environ.get("HF_HUB_CACHE")
    os.environ["HF_HUB_CACHE"] = str(home / HUB)
    try:
        return world.run()
    finally:
        del os.environ["HF_HUB_CACHE"]
        if before is not None:
            os.environ["HF_HUB_CACHE"] = before
        world.close()
        seams.enter(None)
        world.forget()
        del world
        gc.collect()
