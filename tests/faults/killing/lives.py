"""Cycles of a fleet's life: up, pause, scale and down, each cut short by a kill, then repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyctl.core.registry import supervisor_running
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.client import listening
from tests.faults.killing import checks
from tests.faults.killing.commands import Commands
from tests.faults.killing.cycle import Came, Dice, unsupervised
from tests.faults.stub_fleet import StubFleet

NAME = "stubs"
_LIGHT = Path(__file__).parents[2] / "stub" / "light.py"
_ROUTER = Path(__file__).parents[2] / "unit" / "supervisor" / "fake_router.py"
_INTERPRETER = f"""#!/bin/sh
case "$2" in
vllm_router*) shift 2; exec {sys.executable} -I -S {_ROUTER} "$@" ;;
vllm*) shift 2; exec {sys.executable} -I -S {_LIGHT} "$@" ;;
esac
"""


class Lives:
    """A fleet that is started and ended in every cycle."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.paths = FleetPaths(self.home, NAME)
        StubFleet(directory).write(replicas=2, extra="auth: none")
        (directory / "python").write_text(_INTERPRETER)
        self._commands = Commands(directory)
        self._bystander = subprocess.Popen(["sleep", "86400"])

    def close(self) -> None:
        """Bring everything down."""
        try:
            self.skyctl("down", "--drain-timeout", "0")
        finally:
            self._bystander.kill()
            self._bystander.wait()

    def skyctl(self, *arguments: str, kill_at: str = "") -> tuple[int, dict[str, Any], str]:
        return self._commands.run(*arguments, kill_at=kill_at)

    def cycle(self, dice: Dice) -> Came:
        """Die on the way up or down, come again, and leave nothing."""
        came = Came(dice.point, dice.seed, False)
        kind = dice.point.partition(".")[0]
        if kind in ("down", "verb", "scale") or dice.point in ("server.stopping", "server.stopped"):
            code, envelope, _ = self.skyctl("up")
            if code != 0:
                came.violations.append(f"I6: up ended with {code}: {envelope.get('error')}")
            came.killed = self._die_later(dice)
        else:
            code, _, _ = self.skyctl("up", kill_at=dice.at)
            came.killed = code == -9 or self._dead()
        came.violations += self._come_again(dice)
        came.violations += self._end()
        return came

    def _die_later(self, dice: Dice) -> bool:
        """A command on a fleet that is up, by which somebody dies."""
        arguments = {
            "verb": ("pause",),
            "scale": ("scale", "1"),
            "server": ("restart", f"{NAME}-0"),
        }.get(dice.point.partition(".")[0], ("down", "--drain-timeout", "0"))
        if dice.point.startswith(("server.", "down.begin", "down.stopped")):
            self._kill_supervisor()
            self.skyctl("status", kill_at=dice.at)
        code, _, _ = self.skyctl(*arguments, kill_at=dice.at)
        return code == -9 or self._dead()

    def _come_again(self, dice: Dice) -> list[str]:
        """What a user types next, by the seed: each must make of it what it says."""
        choice = ("up", "recover", "down")[dice.seed % 3]
        if choice == "down":
            return []
        if choice == "recover":
            code, envelope, errors = self.skyctl("recover", "--yes")
            if code not in (0, 3) and envelope:
                return [f"I6: recover ended with {code}: {envelope['error']}"]
        self.skyctl("resume")
        code, envelope, errors = self.skyctl("up")
        if code != 0:
            return [f"I6: up ended with {code}: {envelope.get('error') or errors[-200:]}"]
        rows = envelope["data"]["replicas"]
        self.skyctl("resume")
        if {row["state"] for row in rows} not in ({"ready"}, {"paused"}):
            return [f"I6: after up: {[row['state'] for row in rows]}"]
        alive = {p.pid for p in checks.of_home(self.home)}
        expected = {row["pid"] for row in rows} | {envelope["data"]["router"]["pid"]}
        expected.add(listening(self.paths))
        return [f"I4: beside the fleet: {sorted(alive - expected)}"] if alive - expected else []

    def _end(self) -> list[str]:
        found = []
        code, envelope, errors = self.skyctl("down", "--drain-timeout", "0")
        if code != 0:
            found.append(f"I6: down ended with {code}: {envelope.get('error') or errors[-200:]}")
        found += checks.nothing_left(self.home)
        if supervisor_running(self.paths):
            found.append("I4: the supervisor is left")
        if self._bystander.poll() is not None:
            found.append("I3: a bystander was signalled")
        if self.paths.database.exists():
            found += checks.state_is_whole(self.paths.database, None)
            with FleetState(self.paths.database) as state:
                if state.processes():
                    found.append("I6: processes are on record after down")
        return found

    def _kill_supervisor(self) -> None:
        os.kill(listening(self.paths), signal.SIGKILL)
        self._dead()

    def _dead(self) -> bool:
        """Whether the supervisor is dead, within the longest delay of a kill."""
        return unsupervised(self.paths, within_s=0.1)


@contextmanager
def lives(directory: Path) -> Iterator[Lives]:
    """A fleet file; nothing runs after the block."""
    fleet = Lives(directory)
    try:
        yield fleet
    finally:
        fleet.close()
