"""A stub fleet on machines that are this one: its ssh is a script that runs the command here, with
an address and a home of its own, and nothing of our environment.

A machine is its address. While `<hosts>/<address>.off` exists it cannot be reached, and what was
connected is cut.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.faults.stub_fleet import StubFleet

HOSTS = ("me@127.0.0.2", "me@127.0.0.3")
_SSH = """#!{python}
import os, subprocess, sys, threading
address, hosts = sys.argv[1].partition("@")[2], {hosts!r}
if os.path.exists(f"{{hosts}}/{{address}}.off"):
    sys.stderr.write(open(f"{{hosts}}/{{address}}.off").read())
    sys.exit(255)
home = f"{{hosts}}/{{address}}"
os.makedirs(home, exist_ok=True)
there = subprocess.Popen(
    ["sh", "-c", "exec " + sys.argv[2]],
    cwd=home,
    env={{
        "HOME": home,
        "PATH": os.environ["PATH"],
        "SSH_CONNECTION": f"127.0.0.1 1 {{address}} 22",
    }},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
)

def relay():
    while data := os.read(0, 65536):
        try:
            os.write(there.stdin.fileno(), data)
        except BrokenPipeError:
            return
    there.stdin.close()

threading.Thread(target=relay, daemon=True).start()
while data := os.read(there.stdout.fileno(), 65536):
    os.write(1, data)
os._exit(there.wait())
"""
_EXTRA = """
launcher: ssh
ssh:
  hosts: [{hosts}]
  python: {python}
  command: {ssh}
  orphan_grace_s: {grace_s}
"""


@dataclass
class SshFleet(StubFleet):
    """A fleet over two machines."""

    @property
    def hosts(self) -> Path:
        return self.directory / "hosts"

    def lay_out(
        self,
        replicas: int = 2,
        *,
        grace_s: float = 60,
        python: str = "",
        hosts: Sequence[str] = HOSTS,
        command: Sequence[str] = (),
    ) -> None:
        """Write the fleet file, the interpreter of the machines and the ssh that reaches them."""
        self.hosts.mkdir(exist_ok=True)
        ssh = self.directory / "ssh"
        ssh.write_text(_SSH.format(python=sys.executable, hosts=str(self.hosts)))
        ssh.chmod(0o755)
        python = python or str(self.directory / "python")
        more = _EXTRA.format(
            hosts=", ".join(hosts),
            python=python,
            ssh=json.dumps(list(command) or [str(ssh)]),
            grace_s=grace_s,
        )
        self.write(replicas, extra=more)
        text = (self.directory / "fleet.yaml").read_text()
        text = text.replace("model: ./model", f"model: {self.directory}/model")
        text = text.replace("{backoff_s: 0.05}", "{backoff_s: 0.05, backoff_max_s: 2}")
        (self.directory / "fleet.yaml").write_text(text)

    def cut(self, address: str, why: str = "ssh: connect to host: No route to host") -> None:
        """No connection to a machine from now on; those that are end."""
        (self.hosts / f"{address}.off").write_text(why + "\n")
        for process in self.connections(address):
            process.kill()

    def mend(self, address: str) -> None:
        (self.hosts / f"{address}.off").unlink()

    def agents(self, address: str) -> list[psutil.Process]:
        """The connected agents of a machine."""
        return [one for one in self._agents(address) if _stdin(one) != os.devnull]

    def keepers(self, address: str) -> list[psutil.Process]:
        return [one for one in self._agents(address) if _stdin(one) == os.devnull]

    def connections(self, address: str) -> list[psutil.Process]:
        """The ssh processes to a machine, those of short questions too."""
        return [
            one
            for one in psutil.process_iter()
            if str(self.directory / "ssh") in _words(one) and f"me@{address}" in _words(one)
        ]

    def _agents(self, address: str) -> list[psutil.Process]:
        return self._of(address, lambda one: "skyctl.launch.remote.agent" in one.cmdline())

    def servers(self, address: str) -> list[psutil.Process]:
        return self._of(address, lambda one: "--port" in one.cmdline())

    def everything(self) -> list[psutil.Process]:
        """All that runs on any machine."""
        return [one for host in HOSTS for one in self._of(host[3:], lambda one: True)]

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
            if "skyctl.launch.remote.tether" in _words(one)
            and Path(_environ(one).get("SKYCTL_LOG", "")).stem == name
            and _environ(one).get("SKYCTL_HOME") == str(self.directory / "home")
        ]
        return found

    def until(self, states: dict[str, str], timeout_s: float = 30) -> dict[str, dict[str, Any]]:
        """Wait until `status` shows these states; its rows."""
        deadline = time.monotonic() + timeout_s
        while True:
            rows = self.replicas()
            if all(rows[name]["state"] == state for name, state in states.items()):
                return rows
            assert time.monotonic() < deadline, json.dumps(rows, indent=1)
            time.sleep(0.2)

    def end(self) -> None:
        """Whatever a test left."""
        for address in HOSTS:
            (self.hosts / f"{address[3:]}.off").unlink(missing_ok=True)
        down = self.start("down")
        said = down.communicate(timeout=60)
        home = str(self.directory / "home")
        here = [one for one in psutil.process_iter() if _environ(one).get("SKYCTL_HOME") == home]
        left = [*here, *self.everything()]
        for process in left:
            os.kill(process.pid, signal.SIGKILL)
        assert down.returncode in (0, 4), said
        assert not left


def _stdin(process: psutil.Process) -> str:
    try:
        return str(Path(f"/proc/{process.pid}/fd/0").readlink())
    except OSError:  # it has just ended
        return ""


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
