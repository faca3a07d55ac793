"""Up, a kill, down, again and again: what is left behind, and whether a stranger was signalled.

    python -m benchmarks.cycles [--cycles 200] [--minutes 10] [--result FILE]      on stubs
    python -m benchmarks.cycles --real --cycles 10                                on real servers

Each cycle starts a fleet, kills what a seed decides (a server, the router, the supervisor, the
supervisor while servers start, or nothing) and takes the fleet down. Supervisor, servers and router
are real processes; with --real the servers are vLLM's and the commands processes, too.

Three decoys, processes of nobody, stand in the state file of every cycle as if they were ours:

| decoy | recorded as |
|---|---|
| reused pid | a server with its pid and another create time |
| reboot | a server with its pid, its create time, and another boot |
| descendant | below a server of the fleet, with another create time |

An orphan is a process that carries the fleet's state directory in its environment, or was born in
this cycle below us, and still lives after `down`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from skyctl.core.registry import FleetRef, select, supervisor_running
from skyctl.errors import SkyctlError
from skyctl.service import connect
from skyctl.store.identity import ProcessIdentity, identify
from skyctl.store.paths import FleetPaths
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from tests.faults.stub_fleet import StubFleet
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.pids import SHARED_MEMORY, abandoned, abandoned_since

RESULTS = Path(__file__).parent / "results"
KILLS = ("nothing", "server", "router", "supervisor", "supervisor while servers start")
UP_S, GONE_S = 60.0, 15.0


# --- decoys --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoys:
    """Strangers that a fleet's state names."""

    identities: tuple[ProcessIdentity, ...]

    def enter(self, paths: FleetPaths) -> None:
        """Write them into the state file as if they had been ours."""
        reused, reboot, below = self.identities
        stale = replace(reused, create_time=reused.create_time - 100)
        before = replace(reboot, boot_id="another boot")
        with FleetState(paths.database) as state:
            state.save_process(_row("reused", stale))
            state.save_process(_row("reboot", before, (before,)))
            other = replace(below, create_time=below.create_time - 100)
            state.save_process(_row("below", None, (other,)))

    def killed(self) -> int:
        return sum(not identity.alive() for identity in self.identities)


def _row(
    name: str, identity: ProcessIdentity | None, descendants: tuple[ProcessIdentity, ...] = ()
) -> ProcessRow:
    return ProcessRow(
        name, "server", "running", f"decoy-{name}", identity, "none", "127.0.0.1", 1,
        descendants=descendants,
    )  # fmt: skip


@contextmanager
def decoys() -> Iterator[Decoys]:
    processes = [subprocess.Popen(["sleep", "7200"], start_new_session=True) for _ in range(3)]
    try:
        found = [identify(process.pid) for process in processes]
        yield Decoys(tuple(identity for identity in found if identity is not None))
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- the process table ---------------------------------------------------------------------------


def ours(home: Path, before: set[tuple[int, float]]) -> list[psutil.Process]:
    """Live processes of this fleet: by its state directory, or born since `before` below us."""
    found = []
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            tagged = process.environ().get("SKYCTL_HOME") == str(home)
            born = (process.pid, process.create_time()) not in before
            if tagged or (born and process.pid in below):
                found.append(process)
    return found


def table() -> set[tuple[int, float]]:
    """Every process by pid and create time."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.add((process.pid, process.create_time()))
    return found


def orphans(home: Path, before: set[tuple[int, float]]) -> list[str]:
    """What still lives some seconds after `down`; killed, so that the next cycle begins clean."""
    deadline = time.monotonic() + GONE_S
    while (left := ours(home, before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    said = []
    for process in left:
        with suppress(psutil.Error):
            said.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            process.kill()
    return said


# --- stubs, through the operations layer ---------------------------------------------------------


class StubCycles:
    """A fleet of two stubs and a stub of the router; what `up` and `down` call, called here."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        os.environ["SKYCTL_HOME"] = str(self.home)
        StubFleet(directory).write(extra="restart: {policy: never}")
        text = (directory / "fleet.yaml").read_text().replace("restart: {backoff_s: 0.05}\n", "", 1)
        (directory / "fleet.yaml").write_text(text)
        self.ref: FleetRef = select([directory / "fleet.yaml"], None)

    def cycle(self, kill: str, dice: random.Random, strangers: Decoys) -> None:
        asyncio.run(self._cycle(kill, dice, strangers))

    async def _follow(self, operation: int) -> None:
        from skyctl.service.bring_up import follow_operation

        async with connect(self.ref) as fleet:
            await follow_operation(fleet, operation, _unseen, timeout_s=UP_S)

    async def _cycle(self, kill: str, dice: random.Random, strangers: Decoys) -> None:
        from skyctl.service.bring_down import take_down
        from skyctl.service.bring_up import begin_up

        paths = self.ref.paths
        begun = await begin_up(self.ref)
        strangers.enter(paths)
        if kill == "supervisor while servers start":
            await asyncio.sleep(dice.random() * 0.8)
            await self._kill("supervisor", dice)
            if dice.random() < 0.5:  # half of the time another `up` reconciles first
                again = await begin_up(self.ref)
                with suppress(SkyctlError):
                    await self._follow(again.operation)
        else:
            await self._follow(begun.operation)
            await self._kill(kill, dice)
        await take_down(paths, drain_timeout_s=0.0)

    async def _kill(self, what: str, dice: random.Random) -> None:
        with FleetState(self.ref.paths.database) as state:
            rows = {row.name: row for row in state.processes()}
        if what == "nothing":
            return
        if what == "supervisor":
            pid = supervisor_of(self.home)
            if pid is None:
                return
            os.kill(pid, signal.SIGKILL)
            while supervisor_running(self.ref.paths):  # noqa: ASYNC110 - another process's end
                await asyncio.sleep(0.01)
            return
        names = ["router"] if what == "router" else [n for n in rows if n.startswith("stubs-")]
        found = rows[dice.choice(names)].identity
        if found is not None and found.alive():
            os.kill(found.pid, signal.SIGKILL)


def supervisor_of(home: Path) -> int | None:
    """Pid of the supervisor of the one fleet in `home`."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            command = process.cmdline()
            if "skyctl.supervisor" in command and process.environ().get("SKYCTL_HOME") == str(home):
                return process.pid
    return None


def _unseen(status: object) -> None:
    del status


# --- real servers, by command --------------------------------------------------------------------


class RealCycles:
    """A tiny fleet of one vLLM CPU server and the real router; the commands as typed."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.fleet = FleetCli(directory / "tiny", self.home)
        self.fleet.directory.mkdir()
        self.fleet.run("init", "--tiny", ".", "--name", "tiny")
        file = self.fleet.directory / "fleet.yaml"
        lines = (
            "replicas: 1" if line.startswith("replicas:") else line
            for line in file.read_text().splitlines()
        )
        file.write_text("\n".join([*lines, "restart: {policy: never}", ""]))

    def cycle(self, kill: str, dice: random.Random, strangers: Decoys) -> None:
        paths = FleetPaths(self.home, "tiny")
        if kill == "supervisor while servers start":
            starting = self.fleet.start("up")
            while supervisor_of(self.home) is None:
                time.sleep(0.1)
            time.sleep(5 + dice.random() * 20)
        else:
            starting = None
            self.fleet.run("up", timeout_s=UP_TIMEOUT_S)
        strangers.enter(paths)
        with FleetState(paths.database) as state:
            rows = {row.name: row for row in state.processes()}
        if kill in ("server", "router"):
            found = rows["router" if kill == "router" else "tiny-0"].identity
            if found is not None:
                os.kill(found.pid, signal.SIGKILL)
        elif kill != "nothing" and (pid := supervisor_of(self.home)) is not None:
            os.kill(pid, signal.SIGKILL)
        if starting is not None:
            starting.communicate(timeout=60)
        self.fleet.run("down", "--drain-timeout", "0")


# --- all cycles ----------------------------------------------------------------------------------


def run(
    cycles: int, *, real: bool = False, minutes: float = 600.0, seed: int = 0
) -> dict[str, Any]:
    """As many cycles as fit into `minutes`: kills, orphans, foreign kills and failures."""
    dice, began = random.Random(seed), time.monotonic()
    kills: Counter[str] = Counter()
    left: list[str] = []
    failed: list[str] = []
    killed = 0
    abandoned_before = abandoned() if real else set()
    with tempfile.TemporaryDirectory(prefix="cycles-") as temporary, decoys() as strangers:
        fleet = (RealCycles if real else StubCycles)(Path(temporary))
        for number in range(cycles):
            if time.monotonic() - began > minutes * 60:
                break
            kill, before = KILLS[number % len(KILLS)], table()
            try:
                fleet.cycle(kill, dice, strangers)
            except (SkyctlError, AssertionError, subprocess.SubprocessError) as error:
                failed.append(f"{kill}: {error!r}"[:500])
            kills[kill] += 1
            left += [f"{kill}: {orphan}" for orphan in orphans(fleet.home, before)]
            killed = strangers.killed()
            print(f"{number + 1} {kill}: {len(left)} orphans", file=sys.stderr, flush=True)
        shared = _staged(fleet.home)
        if real:
            shared |= {path.name for path in abandoned_since(abandoned_before)}
    return {
        "servers": "real vLLM CPU servers" if real else "stubs",
        "cycles": sum(kills.values()),
        "kills": dict(kills),
        "orphans": left,
        "foreign_kills": killed,
        "shared_memory_left": sorted(shared),
        "failed_commands": failed,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "python": platform.python_version(),
    }


def _staged(home: Path) -> set[str]:
    """Staged weights in memory whose owner is, or was, in this state directory."""
    origins = (SHARED_MEMORY / f"skyctl-{os.getuid()}").glob("*.origin")
    return {origin.name for origin in origins if home in origin.readlink().parents}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cycles")
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    result = run(options.cycles, real=options.real, minutes=options.minutes, seed=options.seed)
    name = "cycles-real.json" if options.real else "cycles.json"
    (options.result or RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(bool(result["orphans"] or result["foreign_kills"]))


if __name__ == "__main__":
    sys.exit(main())
