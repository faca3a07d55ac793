"""A stub fleet on machines that are this one: each has an address and a home of its own, by which
what runs there is found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.faults.stub_fleet import StubFleet
from tests.pids import segments
from tests.tiny import make_tiny_checkpoint

A, B = ADDRESSES = ("127.0.0.2", "127.0.0.3")
GRACE_S = 600
"""For servers that nobody hears of: more than a test takes, however busy the machine."""


class RemoteFleet(StubFleet):
    """A fleet over two machines; what is known of them, whatever the way there is."""

    user = ""  # before an address, where a machine is named
    addresses = ADDRESSES

    @property
    def hosts(self) -> Path:
        """Has the home of each machine."""
        return self.directory / "hosts"

    def lay_out(self, replicas: int = 2, *, grace_s: float = GRACE_S, more: str = "") -> None:
        """Write the fleet file, with `more` lines, and what it needs."""
        raise NotImplementedError

    def connections(self, address: str) -> list[psutil.Process]:
        """The processes here that are connected to a machine, those of short questions too."""
        raise NotImplementedError

    def write_remote(self, replicas: int, extra: str, faults: str = "{}") -> None:
        """`write`, for machines that find everything by its whole path."""
        self.write(replicas, faults, extra)
        text = (self.directory / "fleet.yaml").read_text()
        text = text.replace("model: ./model", f"model: {self.directory}/model")
        text = text.replace("{backoff_s: 0.05}", "{backoff_s: 0.05, backoff_max_s: 2}")
        (self.directory / "fleet.yaml").write_text(text)

    def starts_nothing(self, message: str) -> None:
        """An `up` is refused with this message."""
        process = self.start("up", "--json")
        said, _ = process.communicate(timeout=120)
        assert process.returncode in (1, 2)
        assert message in json.loads(said)["error"]["message"]
        assert self.everything() == []
        assert not (self.directory / "home/fleets/stubs/supervisor.lock").exists()

    def agents(self, address: str) -> list[psutil.Process]:
        """The connected agents of a machine."""
        return [one for one in self._agents(address) if _stdin(one) != os.devnull]

    def keepers(self, address: str) -> list[psutil.Process]:
        return [one for one in self._agents(address) if _stdin(one) == os.devnull]

    def _agents(self, address: str) -> list[psutil.Process]:
        return self._of(address, lambda one: "skyctl.launch.remote.agent" in one.cmdline())

    def servers(self, address: str) -> list[psutil.Process]:
        return self._of(address, lambda one: "--served-model-name" in one.cmdline())

    def everything(self) -> list[psutil.Process]:
        """All of ours that runs on any machine."""
        return [one for host in self.addresses for one in self._of(host, self._is_ours)]

    def _is_ours(self, process: psutil.Process) -> bool:
        return True

    def _of(self, address: str, wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                home = process.environ().get("HOME")
                if home == str(self.hosts / address) and wanted(process):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def tether(self, name: str) -> psutil.Process:
        """The process here that stands for a server."""
        (found,) = [
            one
            for one in psutil.process_iter()
            if "skyctl.launch.remote.tether" in words(one)
            and Path(environ_of(one).get("SKYCTL_LOG", "")).stem == name
            and environ_of(one).get("SKYCTL_HOME") == str(self.directory / "home")
        ]
        return found

    def until(
        self, states: dict[str, str], timeout_s: float = 30, **also: Any
    ) -> dict[str, dict[str, Any]]:
        """Wait until `status` shows these states, and of each `also`; its rows."""
        deadline = time.monotonic() + timeout_s
        while True:
            rows = self.replicas()
            if all(
                {"state": state, **also}.items() <= rows[n].items() for n, state in states.items()
            ):
                return rows
            assert time.monotonic() < deadline, json.dumps(rows, indent=1)
            time.sleep(0.2)

    def push(self, *transports: str) -> None:
        """Push one checkpoint into both servers by each of these."""
        checkpoint = make_tiny_checkpoint(self.directory / "tiny", seed=1)
        for transport in transports:
            asked = ("sync-weights", str(checkpoint), "--transport", transport)
            pushed = self.json(*asked)["data"]["job"]["result"]
            assert pushed["transport"] == transport and len(pushed["servers"]) == 2
            assert all(server["ok"] for server in pushed["servers"])

    def end(self) -> None:
        """Whatever a test left."""
        down = self.start("down")
        said = down.communicate(timeout=60)
        home = str(self.directory / "home")
        here = [one for one in psutil.process_iter() if environ_of(one).get("SKYCTL_HOME") == home]
        left = [*here, *self.everything()]
        named = [words(process) for process in left]
        for process in left:
            os.kill(process.pid, signal.SIGKILL)
        assert down.returncode in (0, 4), said
        assert not named


def _stdin(process: psutil.Process) -> str:
    try:
        return str(Path(f"/proc/{process.pid}/fd/0").readlink())
    except OSError:  # it has just ended
        return ""


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def environ_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def below(process: psutil.Process) -> list[psutil.Process]:
    """It and all that it started."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """None of them sees another one die."""
    found = list(processes)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)


def end_machine(home: Path) -> None:
    """As if the power went: everything whose home this is, and the shared memory of that."""
    there = [one for one in psutil.process_iter() if environ_of(one).get("HOME") == str(home)]
    # some rewrite what is told of them
    found = {one for process in there for one in below(process)}
    shared = segments(*(one.pid for one in found))
    kill_all(found)
    for segment in shared:
        segment.unlink(missing_ok=True)
