"""Cycles on a fleet with a supervisor: it is killed and revived, its stub servers stay."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from skyctl.core.registry import supervisor_running
from skyctl.kill_points import COLOCATED, OUT_OF_ROUTER
from skyctl.store.in_doubt import in_doubt
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.client import listening
from tests.faults.killing import checks
from tests.faults.killing.attached import BOUND_S, measure
from tests.faults.killing.commands import Commands
from tests.faults.killing.cycle import Came, Dice, unsupervised
from tests.faults.killing.trainer import Trainer, stub_checkpoints
from tests.faults.stub_fleet import StubFleet
from tests.stub.state import MEMORY
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

NAME = "stubs"
_YET_TO_BEGIN_S = 0.5
"""A supervisor that was asked for a push has begun it by then."""


class SupervisedFleet:
    """A real fleet of stub processes; commands and supervisors are forked."""

    name = NAME
    scale = 1  # of the chunks' sizes
    bound_s = BOUND_S

    def __init__(self, directory: Path, *, overwrites: bool = False) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.paths = FleetPaths(self.home, self.name)
        self.committed: dict[str, str] = {}  # label by digest
        self._digests: dict[str, str] = {}  # by checkpoint
        self.pids: dict[str, int] = {}
        self.urls: list[str] = []
        self._served: list[int] = []
        self._commands, checkpoints = self._set_up()
        self.trainer = Trainer(checkpoints, overwrites=overwrites)

    def _set_up(self) -> tuple[Commands, dict[str, Path]]:
        """Write the fleet file and the checkpoints; what runs the commands, and where they are."""
        directory = self.directory
        stub_fleet = StubFleet(directory)
        stub_fleet.write(
            replicas=2, extra="auth: none\nweight_transfer: {transport: shm, update_timeout_s: 10}"
        )
        write_checkpoint(directory / "model", tiny_tensors(1))
        self._write_trial()
        return Commands(directory), stub_checkpoints(directory)

    def _write_trial(self, min_logprob: float = -1.0) -> None:
        """A trial that every checkpoint passes."""
        text = f"- {{prompt: ab, expect: {{min_logprob: {min_logprob}}}}}\n"
        (self.directory / "trial.yaml").write_text(text)

    def prepare(self) -> None:
        """Start the fleet and push every checkpoint once, undisturbed."""
        code, envelope, errors = self.skyctl("up")
        assert code == 0, (errors, envelope)
        self.urls = [row["url"] for row in envelope["data"]["replicas"]]
        self.pids = {row["name"]: row["pid"] for row in envelope["data"]["replicas"]}
        for _ in self.trainer.names:
            code, envelope, errors = self.skyctl("sync-weights", self.trainer.next())
            assert code == 0, (errors, envelope)
            states = self._states()
            [digest] = {stub["digest"] for stub in states}
            self._digests[self.trainer.at] = digest
            self.committed[digest] = str(states[0]["weight_version"])
        self._served = [len(stub["served"]) for stub in self._states()]

    def close(self) -> None:
        """Bring everything down."""
        self.skyctl("down", "--drain-timeout", "0")

    def skyctl(
        self, *arguments: str, kill_at: str = "", guardian: bool = False
    ) -> tuple[int, dict[str, Any], str]:
        return self._commands.run(*arguments, kill_at=kill_at, guardian=guardian)

    def cycle(self, dice: Dice) -> Came:
        """Kill the idle supervisor, revive one that is to die, let it, recover, look."""
        if dice.point.startswith("sync."):
            return self._command_dies(dice)
        came = Came(dice.point, dice.seed, False, guardian=dice.guardian)
        before = {stub["digest"] for stub in self._states()}
        again = dice.again and self.trainer.overwrites
        adopting = dice.point.startswith(("adopt.", "recover."))
        if dice.point == "recover.begin":
            self._kill_supervisor()
            self.skyctl("status", kill_at="push.update.sent:2")
            self._push(dice)
        self._kill_supervisor()
        sending = dice.point.startswith("sender.")
        ticket = self.directory / "ticket"
        if sending:  # one sender dies of it, the next one lives
            ticket.write_text(dice.at)
        at = f"@{ticket}" if sending else dice.at
        self.skyctl("status", kill_at=at, guardian=dice.guardian)
        if not adopting:
            came.violations += self._push(dice)
        came.killed = not ticket.exists() if sending else self._dead_soon()
        ticket.unlink(missing_ok=True)
        died_at = time.time()
        pushed = self.trainer.at
        # what nobody accepts before its end goes back, to files that it was written over
        gone = again or (self.trainer.overwrites and dice.point in OUT_OF_ROUTER)
        path = self.trainer.next() if gone else ""
        if not (dice.guardian and came.killed and self._healed_by_guardian(came, gone)):
            came.violations += self._recovered(dice, came, gone)
        with FleetState(self.paths.database) as state:
            measure(came, state.journal.jobs(2), died_at)
        if gone:
            came.violations += self._push_again(path, before, pushed)
        if dice.point in COLOCATED:
            came.violations += self._wake()
        came.violations += self._look()
        return came

    def _push_again(self, path: str, before: set[str], pushed: str) -> list[str]:
        """What the trainer does next, whatever recovery could do without its files."""
        states = self._states()
        for stub, seen in zip(states, self._served, strict=True):
            stub["served"] = stub["served"][seen:]
        found = checks.served_only(states, before | {self._digests[pushed]})
        options = ("--colocated",) if any(self._asleep()) else ()
        code, envelope, errors = self.skyctl("sync-weights", path, *options)
        if code != 0:
            shown = envelope.get("error") or errors[-300:]
            found.append(f"I6: the next push ended with {code}: {shown}")
        elif {stub["digest"] for stub in self._states()} != {self._digests[self.trainer.at]}:
            found.append("I6: exit code 0, and servers at other weights")
        return found

    def _recovered(self, dice: Dice, came: Came, gone: bool) -> list[str]:
        code, envelope, errors = self._recover(dice, came)
        if code == 0 and all(row["ok"] for row in envelope["data"]["recovered"]):
            return []
        if gone and code != 0:
            _, status, _ = self.skyctl("status")
            if status["data"]["health"] != "healthy":
                return []  # its files are gone, and that was said
        return [f"I6: recover ended with {code}: {envelope.get('error') or errors[-300:]}"]

    def _recover(self, dice: Dice, came: Came) -> tuple[int, dict[str, Any], str]:
        if not dice.successor:
            return self.skyctl("recover", "--yes")
        ticket = self.directory / "successor"
        ticket.write_text(dice.successor)
        try:
            return self.skyctl("recover", "--yes", kill_at=f"@{ticket}")
        finally:
            came.successor_killed = not ticket.exists()
            ticket.unlink(missing_ok=True)  # where nothing was to be recovered, nobody took it

    def _command_dies(self, dice: Dice) -> Came:
        """Only the command that asks for a push dies: the push is made, or never was."""
        came = Came(dice.point, dice.seed, False)
        before = {stub["digest"] for stub in self._states()}
        again = dice.again and self.trainer.overwrites
        code, _, _ = self.skyctl("sync-weights", self.trainer.next(), kill_at=dice.at)
        pushed = self.trainer.at
        path = self.trainer.next() if again else ""
        came.killed = code == -signal.SIGKILL
        if not self._pushes_settled():
            came.violations.append("I6: the push did not end")
        if again:  # the push may have begun after that: what it finds is what it was asked for
            came.violations += self._push_again(
                path, before | {self._digests[self.trainer.at]}, pushed
            )
        came.violations += self._look()
        return came

    def _pushes_settled(self) -> bool:
        """Whether every push ends in time; what the dead had just asked for may be yet to begin."""
        deadline = time.monotonic() + self.bound_s
        since = time.monotonic()
        with FleetState(self.paths.database) as state:
            while time.monotonic() < since + _YET_TO_BEGIN_S:
                if time.monotonic() > deadline:
                    return False
                if not all(job.ended for job in state.journal.jobs(1)):
                    since = time.monotonic()
                time.sleep(0.02)
        return True

    def _push(self, dice: Dice) -> list[str]:
        path = self.trainer.next()
        size = str(dice.chunk_bytes * self.scale)
        options: tuple[str, ...] = ("--chunk-size", size, "--transport", dice.transport)
        if dice.point in OUT_OF_ROUTER:
            options += ("--trial", str(self.directory / "trial.yaml"))
        if dice.point in COLOCATED:
            self.skyctl("sleep")
            options += ("--colocated",)
        if dice.point == "push.part.done":
            options += ("--rolling", "1")
        code, _, errors = self.skyctl("sync-weights", path, *options)
        held = {stub["digest"] for stub in self._states()}
        if code == 0 and held != {self._digests[self.trainer.at]}:
            return ["I6: exit code 0, and servers at other weights"]
        if code not in (0, 1, 4):
            return [f"I6: sync-weights ended with {code}: {errors[-200:]}"]
        return []

    def _wake(self) -> list[str]:
        """A fleet that was to sleep on sleeps altogether; then wake it, so that it serves."""
        found = []
        asleep = self._asleep()
        if not set(asleep) <= {0, len(MEMORY)}:
            found.append(f"I6: asleep in part only, {asleep} of {len(MEMORY)} kinds of memory")
        with FleetState(self.paths.database) as state:
            if awake := {row.name for row in state.servers() if row.weights_awake}:
                found.append(f"I6: on record with its weights awake: {sorted(awake)}")
        if any(asleep):
            code, envelope, errors = self.skyctl("wake")
            if code != 0:
                found.append(
                    f"I6: wake ended with {code}: {envelope.get('error') or errors[-200:]}"
                )
        return found

    def _asleep(self) -> list[int]:
        """How many kinds of memory sleep in each server."""
        return [len(stub["asleep"]) for stub in self._states()]

    def _kill_supervisor(self) -> None:
        if supervisor_running(self.paths):
            os.kill(listening(self.paths), signal.SIGKILL)
            self._dead_soon()

    def _dead_soon(self) -> bool:
        """Whether no supervisor holds the fleet any more, within the longest delay of a kill."""
        return unsupervised(self.paths, within_s=0.2)

    def _healed_by_guardian(self, came: Came, gone: bool) -> bool:
        with FleetState(self.paths.database) as state:
            if state.journal.jobs(1)[0].state == "succeeded":
                return False  # it was over: the next command revives the supervisor
        deadline = time.monotonic() + self.bound_s
        while time.monotonic() < deadline:
            if supervisor_running(self.paths):
                with FleetState(self.paths.database) as state:
                    jobs = state.journal.jobs(1)
                    settled = (gone or not in_doubt(state)) and all(job.ended for job in jobs)
                if settled and not checks.nothing_left(self.home, self._expected()):
                    return True
            time.sleep(0.05)
        came.violations.append("I6: the guardian did not recover")
        return False

    def _states(self) -> list[dict[str, Any]]:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            return [client.get(f"{url}/stub/state").json() for url in self.urls]

    def _expected(self) -> set[int]:
        """The fleet's own processes: supervisor, servers, router, and what is below them."""
        expected: set[int] = set()
        with FleetState(self.paths.database) as state:
            for row in state.processes():
                if (process := row.identity and row.identity.process()) is not None:
                    expected |= {process.pid, *(p.pid for p in process.children(recursive=True))}
        if supervisor_running(self.paths):
            with suppress(ConnectionRefusedError):  # it has the lock and does not listen yet
                expected.add(listening(self.paths))
        return expected

    def _look(self) -> list[str]:
        try:
            states = self._states()
        except httpx.HTTPError as error:
            with FleetState(self.paths.database) as state:
                told = " / ".join(f"{event.subject}: {event.message}" for event in state.events(20))
            return [f"I1: a server does not answer ({error!r}) after: {told}"]
        for stub, seen in zip(states, self._served, strict=True):
            stub["served"] = stub["served"][seen:]
        found = checks.served_only(states, self.committed)
        found += checks.at_one_version(states, self.committed)
        found += checks.state_is_whole(self.paths.database, str(states[0]["weight_version"]))
        found += checks.nothing_left_soon(self.home, self.bound_s, self._expected)
        with FleetState(self.paths.database) as state:
            now = {r.name: r.identity.pid for r in state.processes() if r.identity is not None}
        for name, pid in self.pids.items():
            if now.get(name) != pid or not psutil.pid_exists(pid):
                found.append(f"I3: {name} was replaced")
        self.pids |= {name: now[name] for name in self.pids if name in now}
        code, envelope, _ = self.skyctl("status")
        if code != 0 or envelope["data"]["health"] != "healthy":
            found.append(f"I6: status says {envelope['data']['reasons']}")
        self._served = [len(stub["served"]) for stub in self._states()]
        return found


@contextmanager
def supervised_fleet(directory: Path, *, overwrites: bool = False) -> Iterator[SupervisedFleet]:
    """A prepared fleet; everything of it is down at the end of the block.

    `overwrites`: all checkpoints are pushed from one directory (see Trainer).
    """
    fleet = SupervisedFleet(directory, overwrites=overwrites)
    try:
        fleet.prepare()
        yield fleet
    finally:
        fleet.close()
