"""What a supervisor costs that has many machines: 8 servers on each of up to 64 nodes.

    python -m benchmarks.many_nodes
    python -m benchmarks.many_nodes --nodes 8 16 32 64 --write

Servers, processes, network and clock are simulated (tests/simulation); commands, supervisor, state
and router membership are the real code, in one process. `cpu` has the seconds of processor time
that a step took, those of the simulated servers among them: an upper bound of the supervisor's.
`clock` is how long it would have taken (a server starts in 0.5 to 2 s).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from skyctl.core.plan import FleetPlan
from skyctl.core.requests import Pause, Resume
from skyctl.launch.base import Node
from skyctl.push.request import PushRequest
from tests.simulation import seams
from tests.simulation.engine import Engine
from tests.simulation.kernel import Process
from tests.simulation.supervised import SupervisedWorld
from tests.simulation.world import Schedule

RESULTS = Path(__file__).parent / "results" / "many-nodes.json"
PER_NODE = 8
_PATIENCE_S = 600.0
_LOOK_S = 0.1
_IDLE_S = 60.0
_SEEN = {"skyctl.supervisor.resident.refuse_unseen": lambda *_: None}  # nodes have no agents


class ManyNodes(SupervisedWorld):
    """Servers in groups of eight, and nothing that fails by itself."""

    nodes = 1

    def _choose_faults(self) -> frozenset[str]:
        return frozenset()

    def _make_engines(self, count: int, ranks: int) -> list[Engine]:
        return super()._make_engines(self.nodes * PER_NODE, 1)

    def _plan(self) -> FleetPlan:
        plan = super()._plan()
        names = (f"node-{number // PER_NODE}" for number in range(len(plan.servers)))
        servers = (
            replace(spec, node=Node(name, "127.0.0.1", "python", (), 60.0))
            for name, spec in zip(names, plan.servers, strict=True)
        )
        return replace(plan, servers=tuple(servers))

    def _look(self) -> None:
        """Nobody checks here what answers."""

    def _begin(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}
        with self.step("up"):
            super()._begin()
            self.until(self.all_ready)

    def all_ready(self) -> bool:
        supervisor = self.supervisor
        replicas = supervisor.replicas.values() if supervisor else ()
        routed = set(self.router.workers)
        return len(replicas) == len(self.engines) and all(
            replica.phase == "up" and replica.spec.url in routed for replica in replicas
        )

    def until(self, done: Callable[[], bool]) -> None:
        deadline = self.loop.now + _PATIENCE_S
        while not done():  # looking costs time, too
            if self.loop.now > deadline:
                raise SystemExit(f"it takes for ever: {self.violations}")
            self.loop.run_until(self.loop.now + _LOOK_S)

    def ended(self, command: Process) -> None:
        self.until(lambda: command.dead)
        if command.error is not None:
            raise SystemExit(f"{command.label}: {command.error}")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        cpu, clock = time.process_time(), self.loop.now
        yield
        self.steps[name] = {
            "cpu_s": round(time.process_time() - cpu, 3),
            "clock_s": round(self.loop.now - clock, 2),
        }

    def measure(self) -> dict[str, dict[str, float]]:
        self._begin()
        with self.step("a minute of health checks"):
            self.loop.run_until(self.loop.now + _IDLE_S)
        for control in (Pause(), Resume()):
            with self.step(control.verb):
                self.ended(self.type(control))
        path = self.checkpoints.write("next", 1)
        with self.step("push"):
            self.ended(self.push(PushRequest(path), 1))
        with self.step("status"):
            self.ended(self.type("status"))
        with self.step("a node is lost"):
            for engine in self.engines[:PER_NODE]:
                assert engine.process is not None
                self.kernel.kill(engine.process, "its node is gone")
            self.until(lambda: not self.all_ready())
            self.until(self.all_ready)
        if self.violations:
            raise SystemExit("\n".join(self.violations))
        return self.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--write", action="store_true", help=f"store {RESULTS.name}")
    options = parser.parse_args()
    found: dict[int, dict[str, dict[str, float]]] = {}
    for nodes in options.nodes:
        ManyNodes.nodes = nodes
        with tempfile.TemporaryDirectory() as home, seams.installed(), seams.replaced(_SEEN):
            gc.disable()  # what is collected runs code
            world = ManyNodes(Schedule(1, "supervised"), Path(home))
            seams.enter(world)
            try:
                found[nodes] = world.measure()
            finally:
                world.close()
                seams.enter(None)
                world.forget()
    print(f"{'cpu ms per server':28}" + "".join(f"{n * PER_NODE:>8}" for n in found))
    for step in next(iter(found.values())):
        each = (one[step]["cpu_s"] * 1000 / (n * PER_NODE) for n, one in found.items())
        print(f"{step:28}" + "".join(f"{ms:8.2f}" for ms in each))
    print(json.dumps(found[options.nodes[-1]]))
    if options.write:
        result = {
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "servers_per_node": PER_NODE,
            "nodes": found,
        }
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
