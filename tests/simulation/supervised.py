"""A fleet whose servers skyctl starts: its supervisor, their processes and the router."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

from skyctl.core.plan import FleetPlan, RouterSpec, ServerSpec
from skyctl.core.requests import Restart
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.launches import Device
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.transport import Request
from skyctl.launch.base import ChosenPlace
from skyctl.launch.local.host import LOCAL
from skyctl.service import bring_up
from skyctl.store.credentials import AT_SPAWN, CONTROL_TOKEN
from skyctl.store.identity import ProcessIdentity
from skyctl.store.paths import FleetPaths
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor import daemon
from skyctl.supervisor.resident import Supervisor
from tests.simulation import people
from tests.simulation.engine import STRANGER
from tests.simulation.kernel import BOOT, Process, current
from tests.simulation.loop import PROCESS
from tests.simulation.network import _NOBODY, Reply, body
from tests.simulation.world import World, configured, plain

SERVER, ROUTER = "a server", "a router"
ROUTER_URL = "http://127.0.0.1:8000"


class SimManaged:
    """A `ChildProcess`: one simulated process, and nothing below it."""

    world: Any

    def __init__(
        self,
        identity: ProcessIdentity | None,
        token: str,
        descendants: Iterable[ProcessIdentity] = (),
    ) -> None:
        self.identity = identity
        self.token = token
        self.descendants: tuple[ProcessIdentity, ...] = ()
        self.exited = asyncio.Event()
        process, owner = self._process(), PROCESS.get()
        if process is None:
            self.exited.set()
            return
        loop = self.world.loop
        process.on_death.append(
            lambda: loop.call_later(0.001, self.exited.set, context=owner.context)
        )

    @classmethod
    def spawn(
        cls, argv: Sequence[str], env: Mapping[str, str], log: Path, token: str
    ) -> SimManaged:
        process = cls.world.launch(log.stem, argv, env)
        cls.world.tokens[token] = process
        cls.world.names[token] = log.stem
        return cls(process.identity, token)

    def _process(self) -> Process | None:
        """By its identity, or, when that was never recorded, by its token."""
        if self.identity is not None:
            return self.world.kernel.find(self.identity)
        found = self.world.tokens.get(self.token)
        return None if found is None or found.dead else found

    @property
    def pid(self) -> int | None:
        return self.identity.pid if self.identity else None

    def alive(self) -> bool:
        return self.identity is not None and self.world.kernel.find(self.identity) is not None

    def exit_text(self) -> str:
        return "exited"

    def record_descendants(self) -> bool:
        """Now and then a process below it is seen for the first time."""
        return self.world.dice.random() < 0.1

    def record_segments(self) -> None: ...

    def place(self) -> ChosenPlace | None:
        return None

    def connection_lost(self) -> str:
        return ""

    async def lost(self) -> str:
        return ""

    async def settled(self) -> None: ...

    def resident_bytes(self) -> int | None:
        return None

    def listens_at(self, port: int) -> bool:
        return any(
            engine.process is self._process() and engine.url.endswith(f":{port}")
            for engine in self.world.engines
        )

    def members(self) -> list[Any]:
        process = self._process()
        return [] if process is None else [process]

    async def stop(self, timeout_s: float) -> bool:
        current()
        process = self._process()
        if process is not None:
            await asyncio.sleep(self.world.dice.random() * 0.3)
            self.world.kernel.kill(process, "is stopped")
        return True


class SimRouter:
    """A vllm-router: a list of workers that can be changed while it runs."""

    def __init__(self, world: SupervisedWorld) -> None:
        self.world = world
        self.process: Process | None = None
        self.ready_at = 0.0
        self.workers: list[str] = []

    def start(self, process: Process, workers: Sequence[str]) -> None:
        self.process = process
        self.workers = list(workers)
        self.ready_at = self.world.loop.now + self.world.dice.random()

    def receive(self, request: Request, caller: Process | None, reply: Reply) -> None:
        path, _, query = request.path.partition("?")
        url = parse_qs(query).get("url", [""])[0]
        if self.world.loop.now < self.ready_at:
            reply(503, b"")
        elif path == "/add_worker":
            engine = self.world.engine_at(url)
            if engine is None or engine.process is None or engine.process.dead:
                return  # it probes a server that does not answer, and blocks
            if url not in self.workers:
                self.workers.append(url)
            reply(200, b"")
        elif path == "/remove_worker":
            if url in self.workers:
                self.workers.remove(url)
            reply(200, b"")
        elif path == "/list_workers":
            reply(200, body({"urls": self.workers}))
        else:
            reply(200, b"")


class Api:
    """The supervisor's socket: requests become calls of its ASGI app, in its process."""

    def __init__(self, world: SupervisedWorld, process: Process) -> None:
        self.world = world
        self.process: Process | None = process
        self.app: Any = None
        self.waiting: list[tuple[Request, Process | None, Reply]] = []

    def serve(self, app: Any) -> None:
        """Answer from now on, first what has waited."""
        self.app = app
        for request, caller, reply in self.waiting:
            self.receive(request, caller, reply)

    def receive(self, request: Request, caller: Process | None, reply: Reply) -> None:
        process = self.process
        assert process is not None
        if self.app is None:  # it listens, and does not answer yet
            self.waiting.append((request, caller, reply))
            return
        context = process.context.copy()  # what a request sets is its own
        self.world.loop.create_task(self._answer(request, reply), context=context)

    async def _answer(self, request: Request, reply: Reply) -> None:
        path, _, query = request.path.partition("?")
        scope = {
            "type": "http",
            "method": request.method,
            "path": f"/v1{path}",
            "raw_path": f"/v1{path}".encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in request.headers.items()],
            "server": ("supervisor", 80),
            "client": None,
            "http_version": "1.1",
        }
        status, parts = 500, []
        heard = False

        async def receive() -> Any:
            nonlocal heard
            if heard:  # the next thing that a caller does is to hang up
                while not reply.gone():  # noqa: ASYNC110 - it may die in ways that tell nobody
                    await asyncio.sleep(0.01)
                return {"type": "http.disconnect"}
            heard = True
            return {"type": "http.request", "body": request.body or b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        try:
            await self.app(scope, receive, send)
        except Exception as error:
            self.world.violate(f"supervisor: a request raised {type(error).__name__}: {error}")
            reply(500, b"Internal Server Error")
            return
        reply(status, b"".join(parts))


class SupervisedWorld(World):
    """See World."""

    supervised = True
    faults_known = (*people.FAULTS, *people.SUPERVISED_FAULTS)

    def _begin(self) -> None:
        SimManaged.world = self
        self.tokens: dict[str, Process] = {}
        self.names: dict[str, str] = {}  # by token
        self.supervisor: Supervisor | None = None
        self.supervising: Process | None = None
        self.router = SimRouter(self)
        self.network.serve(ROUTER_URL, self.router)
        self.network.on_arrival = self._look
        for engine in self.engines:
            held = self.ref.paths.hold_file(engine.name)
            held.unlink(missing_ok=True)
            engine.held = partial(os.path.exists, str(held))
        self.ref.paths.database.touch()
        self.plan = self._plan()
        up = self._command("up", self._up)
        self.loop.run_until(60.0, lambda: up.dead)
        if up.error is not None:
            self.violate(f"up fails: {up.error}")

    def _config(self, name: str) -> FleetConfig:
        return configured(
            name=name,
            model=self.base,
            replicas=len(self.engines),
            stop_timeout_s=5.0,
            drain_timeout_s=3.0,
            health={"interval_s": 2.0, "timeout_s": 2.0, "failures": 3, "startup_timeout_s": 30.0},
            restart={"backoff_s": 0.5, "max_restarts": 5},
        )

    def _plan(self) -> FleetPlan:
        servers = tuple(
            ServerSpec(
                engine.name,
                (SERVER,),
                {CONTROL_TOKEN: AT_SPAWN} if "guard" in self.faults else {},
                "127.0.0.1",
                9000 + number,
                world_size=engine.ranks,
                backend="skyctl",
            )
            for number, engine in enumerate(self.engines)
        )
        router = RouterSpec((ROUTER,), {}, "127.0.0.1", 8000, 8001)
        device: Device = (
            "cuda" if people.SLEEPS in self.faults else "cpu"
        )  # there a sleep frees none
        return FleetPlan(
            "sim", device, self.base, "sim", servers, router, self.ref.config, base_dir=self.home
        )

    # --- processes that skyctl starts -----------------------------------------------------------

    def launch(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Process:
        """A server or the router."""
        current()
        if argv[0] == ROUTER:
            process = self.kernel.spawn("router", None)
            self.router.start(process, argv[argv.index("--worker-urls") + 1 :])
            return process
        engine = next(engine for engine in self.engines if engine.name == name)
        process = self.kernel.spawn(f"server {engine.name}", None)
        if engine.process is not None and not engine.process.dead:
            # the port is taken
            self.loop.call_later(0.5, self.kernel.kill, process, "cannot bind", context=_NOBODY)
            return process
        engine.held = partial(os.path.exists, env[HELD_VARIABLE])
        engine.start(process, self.dice.uniform(0.5, 2.0))
        return process

    def _look(self) -> None:
        """A server may begin to answer because time passed, or a file is gone."""
        for engine in self.engines:
            serving = engine.serving
            if serving and not engine.seen_serving:
                self._watch(engine, "answers")
            engine.seen_serving = serving

    def _restart_servers(self) -> None:
        """Whoever supervises them does."""

    def _restart_quarantined(self, names: Collection[str]) -> None:
        """So does `recover`."""

    def close(self) -> None:
        super().close()
        SimManaged.world = None

    def is_down(self) -> bool:
        nobody = self.supervising is None or self.supervising.dead
        return nobody and all(one.process is None or one.process.dead for one in self.engines)

    def _pusher(self) -> Process | None:
        return self.supervising

    def last_write_of(self, pusher: Process | None, ended: float) -> float:
        return ended - 2.0  # it may be bringing a server that has restarted by now

    def _push_under_way(self) -> bool:
        return self.supervisor is not None and self.supervisor.push_job is not None

    def check_routing(self) -> None:
        supervisor, supervising = self.supervisor, self.supervising
        if supervisor is None or supervising is None or supervising.dead:
            if not self.is_down():
                self.violate("supervisor: none is left")
            return
        for event in supervisor.state.events(1000):
            if "the supervisor failed" in event.message:
                self.violate(f"bug: {plain(event.message)[:160]}")
            if event.subject != "fleet" and event.message.startswith("cannot write"):
                self.violate("ended: a server was ended because something could not be written")
        for engine in self.engines:
            replica = supervisor.replicas.get(engine.name)
            by_verb = self.verbs_open and not engine.frozen_for_push
            slept = engine.asleep and engine.slept_by and engine.slept_by.label == STRANGER
            excused = not engine.serving and bool(by_verb or engine.meddled_with or slept)
            if replica is None or replica.state != "ready" or excused:
                continue
            if engine.process is None or engine.process.dead:
                self.violate("gone: a server is shown as ready, and its process is dead")
            elif not engine.serving:
                self.violate("gone: a server is shown as ready, and answers nobody")
            elif engine.url not in self.router.workers:
                self.violate("router: a server is ready, and not routed")
        if self.router.process is None or self.router.process.dead:
            if supervisor.router is not None and supervisor.router.state == "ready":
                self.violate("gone: the router is shown as ready, and its process is dead")
            return
        for url in self.router.workers:
            engine = self.engine_at(url)
            assert engine is not None
            if engine.asleep and supervisor.replicas[engine.name].row.sleep_level:
                self.violate("router: a server that sleeps is routed")

    def note_names(self, state: FleetState) -> None:
        """They are named as planned."""

    def _targets(self, fleet: Any) -> Sequence[Any]:
        return self.engines

    def _at_work(self) -> bool:
        supervisor = self.supervisor
        process = self.supervising
        if supervisor is None or process is None or process.dead or process.stopped:
            return False
        operation, router = supervisor.operation, supervisor.router
        if any(not replica.phase.settled for replica in supervisor.replicas.values()):
            return True
        if router is not None:
            behind = router.workers != set(supervisor.desired().values())
            # without a server it waits, which may be for ever
            if router.phase in ("starting", "restarting") or (router.phase == "ready" and behind):
                return True
        return supervisor.push_job is not None or (
            operation is not None and operation.ended_at is None
        )

    def _on_record(self, fleet: Any) -> bool:
        on_disk = self.supervisor is not None and self.supervisor.state.unrecorded is None
        return on_disk and not (self.disk.full or self.disk.failing)

    # --- commands -------------------------------------------------------------------------------

    def _operations(self) -> dict[str, Callable[[], Coroutine[Any, Any, Any]]]:
        return {"up": self._up, "restart": self._restart}

    async def _up(self) -> Any:
        begun = await bring_up.begin_up(self.ref)
        return await self._fleet(lambda fleet: self._follow(fleet, begun.operation))

    async def _restart(self) -> Any:
        async def use(fleet: Any) -> Any:
            asked = Restart((self.dice.choice(self.engines).name,))
            return await self._follow(fleet, await fleet.restart(asked))

        return await self._fleet(use)

    async def _follow(self, fleet: Any, operation: int) -> Any:
        if not operation:
            return None
        status = await bring_up.follow_operation(
            fleet, operation, lambda status: None, timeout_s=200.0
        )
        self.tell(f"{status.operation} {status.health} {status.reasons}")
        return status


# --- seams ------------------------------------------------------------------------------------


def _spawn_supervisor(paths: FleetPaths) -> Any:
    world = SimManaged.world
    process = world.kernel.spawn("supervisor", lambda: daemon.serve(paths))

    def died() -> None:
        world.tell("the fleet has no supervisor")
        if process.error is not None and not isinstance(process.error, SkyctlError):
            world.violate(f"bug: supervisor: {plain(repr(process.error))[:120]}")

    process.on_death.append(died)
    return SimpleNamespace(poll=lambda: 0 if process.dead else None)


def _live_processes(directory: Path) -> list[ProcessRow]:
    """What the environment of its processes tells of a fleet."""
    world = SimManaged.world
    return [
        ProcessRow(
            name=world.names[token],
            role="router" if world.names[token] == "router" else "server",
            phase="running",
            token=token,
            identity=process.identity,
            spec_hash="unknown",
            host="127.0.0.1",
            port=0,
            started_at=0.0,
        )
        for token, process in world.tokens.items()
        if not process.dead
    ]


@contextlib.contextmanager
def _socket(paths: FleetPaths) -> Iterator[Api]:
    process = current()
    assert process is not None
    api = Api(SimManaged.world, process)
    SimManaged.world.network.serve(str(paths.socket), api)
    yield api


class _Uvicorn:
    """Serves an app at the fleet's socket until `should_exit`, which it looks at now and then."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._asked = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        return self._asked.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        assert value
        self._asked.set()

    async def serve(self, sockets: list[Api]) -> None:
        loop = SimManaged.world.loop
        await asyncio.sleep(SimManaged.world.dice.random() * 0.05)
        sockets[0].serve(self.app)
        began = loop.now
        await self._asked.wait()
        await asyncio.sleep(0.1 - (loop.now - began) % 0.1)


class _Supervisor(Supervisor):
    """The world looks at it from outside."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        SimManaged.world.supervisor, SimManaged.world.supervising = self, current()


daemon.load_everything()  # as each supervisor does when it starts

SEAMS: dict[str, Any] = {
    "skyctl.supervisor.daemon.load_everything": lambda: None,
    "skyctl.supervisor.daemon._spawn": _spawn_supervisor,
    "skyctl.supervisor.daemon._socket": _socket,
    "skyctl.supervisor.daemon.QuietServer": _Uvicorn,
    "skyctl.supervisor.daemon.uvicorn.Config": lambda app, **_: app,
    "skyctl.supervisor.daemon.Supervisor": _Supervisor,
    "skyctl.supervisor.daemon.become_subreaper": lambda: None,
    "skyctl.supervisor.daemon._log": lambda line: SimManaged.world.tell(f"supervisor: {line}"),
    "skyctl.supervisor.kept.mark_start": lambda *_: None,  # nothing is written to logs
    "skyctl.launch.local.host.LOCAL": replace(
        LOCAL,
        spawn=SimManaged.spawn,
        adopt=SimManaged,
        environment=lambda paths: {},
        sweep=lambda paths: None,
        port_holder=lambda host, port: None,
    ),
    "skyctl.store.state.live_processes": _live_processes,
    "skyctl.core.planning.plan_here": lambda *_, **__: SimManaged.world.plan,
    "skyctl.core.planning.check_plan": lambda *_, **__: (),
    "skyctl.service.unsupervised.boot_id": lambda: BOOT,
    "skyctl.store.paths.FleetPaths.refuse_foreign": lambda self: None,
    # who follows something asks less often: nothing is learned from it here
    "skyctl.core.following.FOLLOW_POLL_S": 0.7,
    "skyctl.service.bring_up.FOLLOW_POLL_S": 1.1,
    # who finds it taken is refused at once
    "skyctl.service.revive.UP_LOCK_WAIT_S": 0.0,
}
