"""A stub fleet on machines that are this one: its ssh is a script that runs the command here, with
an address and a home of its own, and nothing of our environment.

A machine is its address. While `<hosts>/<address>.off` exists it cannot be reached, and what was
connected is cut.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.faults.remote_fleet import ADDRESSES, GRACE_S, A, B, RemoteFleet, words

HOSTS = tuple(f"me@{address}" for address in ADDRESSES)
_SSH = """#!{python}
import os, subprocess, sys, threading
address, hosts = sys.argv[1].partition("@")[2], {hosts!r}
if os.path.exists(f"{{hosts}}/{{address}}.off"):
    sys.stderr.write(open(f"{{hosts}}/{{address}}.off").read())
    sys.exit(255)
home = f"{{hosts}}/{{address}}"
os.makedirs(home, exist_ok=True)
inherited = {{}} if {alone} else os.environ
there = subprocess.Popen(
    [*{within!r}.get(address, []), "sh", "-c", "exec " + sys.argv[2]],
    cwd=home,
    env={{
        **inherited,
        **{environ!r}.get(address, {{}}),
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


def write_ssh(
    ssh: Path,
    hosts: Path,
    *,
    within: Mapping[str, Sequence[str]] | None = None,
    environ: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    """Write an ssh to machines whose homes are in `hosts`. By address, `within` has what comes
    before a command there, and `environ` more variables: with it, machines have ours as well.
    """
    hosts.mkdir(exist_ok=True)
    ssh.write_text(
        _SSH.format(
            python=sys.executable,
            hosts=str(hosts),
            within=dict(within or {}),
            environ={address: dict(more) for address, more in (environ or {}).items()},
            alone=environ is None,
        )
    )
    ssh.chmod(0o755)
    return ssh


class SshFleet(RemoteFleet):
    """A fleet over two machines that are reached by ssh."""

    user = "me@"

    def lay_out(
        self,
        replicas: int = 2,
        *,
        grace_s: float = GRACE_S,
        python: str = "",
        hosts: Sequence[str] = HOSTS,
        within: Mapping[str, Sequence[str]] | None = None,
        command: Sequence[str] = (),
        more: str = "",
        faults: str = "{}",
    ) -> None:
        """Write the fleet file, the interpreter of the machines and the ssh that reaches them."""
        ssh = self.write_ssh(within or {})
        python = python or str(self.directory / "python")
        extra = _EXTRA.format(
            hosts=", ".join(hosts),
            python=python,
            ssh=json.dumps(list(command) or [str(ssh)]),
            grace_s=grace_s,
        )
        self.write_remote(replicas, extra + more, faults)

    def write_ssh(self, within: Mapping[str, Sequence[str]]) -> Path:
        """The ssh that reaches the machines. `within` has, by address, what comes before a command
        there."""
        return write_ssh(self.directory / "ssh", self.hosts, within=within)

    def cut(self, address: str, why: str = "ssh: connect to host: No route to host") -> None:
        """No connection to a machine from now on; those that are end."""
        (self.hosts / f"{address}.off").write_text(why + "\n")
        for process in self.connections(address):
            process.kill()

    def mend(self, address: str) -> None:
        (self.hosts / f"{address}.off").unlink()

    def connections(self, address: str) -> list[psutil.Process]:
        return [
            one
            for one in psutil.process_iter()
            if str(self.directory / "ssh") in words(one) and f"me@{address}" in words(one)
        ]

    def end(self) -> None:
        for address in self.addresses:
            (self.hosts / f"{address}.off").unlink(missing_ok=True)
        super().end()


def comes_down_but_for_a_silent_machine(fleet: SshFleet) -> None:
    """`down` names the machine that does not answer, and a later one ends the rest."""
    fleet.run("up")
    fleet.cut(B)
    message = fleet.json("down", expect=1)["error"]["message"]
    assert f"me@{B} cannot be asked over ssh: ssh: connect to host: No route to host" in message
    left = {address: len(fleet.servers(address)) for address in (A, B)}
    assert left == {A: 0, B: 1}, left
    fleet.mend(B)
    fleet.run("down")
    assert fleet.everything() == []
