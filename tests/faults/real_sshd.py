"""Machines that are loopback addresses of this one, each with a real sshd of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
HOSTS = ("127.0.0.2", "127.0.0.3")
_SERVER = """
Port {port}
ListenAddress {host}
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
PidFile none
StrictModes no
PasswordAuthentication no
SetEnv SKYCTL_HOME={home}
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


@dataclass
class RealSshd:
    """`command` is the ssh that reaches `HOSTS`; their keys are not trusted yet."""

    directory: Path
    port: int
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return ["ssh", "-T", "-F", str(self.directory / "ssh_config")]

    def prepare(self) -> None:
        for name in ("host", "user"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
            subprocess.run([*keygen, str(self.directory / name)], check=True)
        client = _CLIENT.format(directory=self.directory, port=self.port, user=getpass.getuser())
        (self.directory / "ssh_config").write_text(client)

    def trust(self) -> None:
        """As a first `ssh` by hand does."""
        key = (self.directory / "host.pub").read_text()
        lines = [f"[{host}]:{self.port} {key}" for host in HOSTS]
        (self.directory / "known").write_text("".join(lines))

    def boot(self, host: str) -> None:
        config, log = self.directory / f"sshd-{host}", self.directory / f"sshd-{host}.log"
        home = self._home(host)
        config.write_text(
            _SERVER.format(directory=self.directory, port=self.port, host=host, home=home)
        )
        assert SSHD is not None
        with log.open("w") as file:
            daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=file)
        self.daemons[host] = daemon
        time.sleep(1)
        if daemon.poll() is not None:  # as root it wants a user and a directory of its own
            pytest.skip(f"sshd does not start: {log.read_text().strip()}")

    def lose(self, host: str) -> None:
        """As if the power went: sshd, its sessions and all that they started."""
        daemon = psutil.Process(self.daemons.pop(host).pid)
        daemon.suspend()  # no session more
        for process in (*daemon.children(recursive=True), *self.running(host), daemon):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([daemon], timeout=10)

    def running(self, *hosts: str) -> list[psutil.Process]:
        """What runs on these machines, or on all, for a fleet."""
        homes = {self._home(host) for host in hosts or HOSTS}
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SKYCTL_HOME") in homes:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def _home(self, host: str) -> str:
        return str(self.directory / "there" / host)


@contextmanager
def running_sshd(directory: Path) -> Iterator[RealSshd]:
    """One at each of `HOSTS`; the test is skipped where none starts."""
    if SSHD is None:
        pytest.skip("there is no sshd on this machine")
    found = RealSshd(directory, 22022 + os.getpid() % 1000)
    found.prepare()
    try:
        for host in HOSTS:
            found.boot(host)
        yield found
    finally:
        for daemon in found.daemons.values():
            daemon.terminate()
            daemon.wait()
