"""A fleet on machines that are loopback addresses of this one, each with a real sshd and a home of
its own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyctl.launch.local.host import port_holder
from tests.faults.remote_fleet import ADDRESSES, below, end_machine, kill_all
from tests.faults.ssh_fleet import SshFleet
from tests.faults.stub_fleet import ROOT

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
_START_S = 10.0
_SERVER = """
Port {port}
ListenAddress {address}
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
PidFile none
StrictModes no
PasswordAuthentication no
SetEnv HOME={home} PYTHONPATH={root}
"""
_CLIENT = """
Port {port}
User {user}
IdentityFile {directory}/user
IdentitiesOnly yes
UserKnownHostsFile {directory}/known
BatchMode yes
ControlPath none
"""


class SshdFleet(SshFleet):
    """A fleet over two machines, whose host keys nobody trusts before `trust`."""

    user = ""
    launcher = "ssh"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._port = 22022 + os.getpid() % 1000
        self._keys = directory / "sshd"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def section(self) -> dict[str, Any]:
        """Where the machines are and what reaches them, for the fleet file."""
        command = ["ssh", "-T", "-F", str(self._keys / "config")]
        return {"hosts": list(ADDRESSES), "command": command}

    def begin(self) -> None:
        self._keys.mkdir()
        for name in ("host", "user"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
            subprocess.run([*keygen, str(self._keys / name)], check=True)
        client = _CLIENT.format(directory=self._keys, port=self._port, user=getpass.getuser())
        (self._keys / "config").write_text(client)
        if os.geteuid() == 0:  # as its service does
            Path("/run/sshd").mkdir(exist_ok=True)
        for address in ADDRESSES:
            self.boot(address)

    def trust(self) -> None:
        """As a first `ssh` by hand does."""
        key = (self._keys / "host.pub").read_text()
        lines = [f"[{address}]:{self._port} {key}" for address in ADDRESSES]
        (self._keys / "known").write_text("".join(lines))

    def boot(self, address: str) -> None:
        """Start a machine's sshd; the test is skipped where none starts."""
        assert SSHD is not None
        home = self.hosts / address
        home.mkdir(parents=True, exist_ok=True)
        config, log = self._keys / f"{address}.config", self._keys / f"{address}.log"
        values = {"directory": self._keys, "port": self._port, "address": address}
        config.write_text(_SERVER.format(**values, home=home, root=ROOT))
        with log.open("w") as file:
            daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=file)
        self._daemons[address] = daemon
        deadline = time.monotonic() + _START_S
        while not port_holder(address, self._port):
            if daemon.poll() is not None:
                pytest.skip(f"sshd does not start: {log.read_text().strip()}")
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def lose(self, address: str) -> None:
        """A machine is gone: its sshd, everything that runs there, and their shared memory."""
        self._end_sshd(address)
        end_machine(self.hosts / address)

    def end_machines(self) -> None:
        for address in list(self._daemons):
            self._end_sshd(address)

    def _end_sshd(self, address: str) -> None:
        """With its sessions."""
        daemon = self._daemons.pop(address)
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGSTOP)  # no session more
            kill_all(below(psutil.Process(daemon.pid)))
            daemon.wait()


@contextmanager
def running_sshd(directory: Path) -> Iterator[SshdFleet]:
    """A fleet that is not laid out yet; no sshd is left afterwards."""
    if SSHD is None:
        pytest.skip("there is no sshd on this machine")
    fleet = SshdFleet(directory)
    try:
        fleet.begin()
        yield fleet
    finally:
        fleet.end_machines()
