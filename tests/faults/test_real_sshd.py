"""`launcher: ssh` with the real ssh and sshd, which listens on loopback addresses of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from tests.faults.ssh_fleet import SshFleet

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
HOSTS = ("127.0.0.2", "127.0.0.3")
_SERVER = """
Port {port}
ListenAddress 127.0.0.2
ListenAddress 127.0.0.3
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
PidFile none
StrictModes no
PasswordAuthentication no
SetEnv SKYCTL_HOME={directory}/there
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

pytestmark = pytest.mark.skipif(SSHD is None, reason="there is no sshd on this machine")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SshFleet]:
    fleet = SshFleet(tmp_path / "fleet")
    fleet.directory.mkdir()
    for name in ("host", "user"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(keygen, check=True)
    values = {"directory": tmp_path, "user": getpass.getuser(), "port": 22022 + os.getpid() % 1000}
    (tmp_path / "sshd_config").write_text(_SERVER.format(**values))
    (tmp_path / "ssh_config").write_text(_CLIENT.format(**values))
    assert SSHD is not None
    with (tmp_path / "sshd.log").open("w") as log:
        sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=log)
    time.sleep(1)
    if sshd.poll() is not None:  # as root it wants a user and a directory of its own
        pytest.skip(f"sshd does not start: {(tmp_path / 'sshd.log').read_text().strip()}")
    fleet.lay_out(
        hosts=HOSTS,
        command=["ssh", "-T", "-F", str(tmp_path / "ssh_config")],
        more="weight_transfer: {transport: shm}",
    )
    yield fleet
    fleet.run("down")
    sshd.terminate()
    sshd.wait()


def there(fleet: SshFleet) -> list[psutil.Process]:
    """All that the machines run for it."""
    home = str(fleet.directory.parent / "there")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SKYCTL_HOME") == home:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_a_fleet_over_a_real_sshd(fleet: SshFleet) -> None:
    refused = fleet.json("up", expect=1)["error"]["message"]
    assert refused.startswith(
        "127.0.0.2: its host key is not known here, or has changed; 127.0.0.3"
    )
    key = (fleet.directory.parent / "host.pub").read_text()
    port = 22022 + os.getpid() % 1000
    lines = [f"[{host}]:{port} {key}" for host in HOSTS]
    (fleet.directory.parent / "known").write_text("".join(lines))
    fleet.run("up")
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert [row["node"] for row in rows.values()] == list(HOSTS)
    assert [urlsplit(row["url"]).hostname for row in rows.values()] == list(HOSTS)
    for connection in fleet.tether("stubs-0").children():
        connection.kill()
    time.sleep(3)
    assert fleet.until({"stubs-0": "ready"})["stubs-0"]["pid"] == rows["stubs-0"]["pid"]
    checkpoint = make_tiny_checkpoint(fleet.directory / "tiny", seed=1)
    for transport in ("shm", "disk"):  # by shm each machine has a sender of its own
        asked = ("sync-weights", str(checkpoint), "--transport", transport)
        pushed = fleet.json(*asked)["data"]["job"]["result"]
        assert pushed["transport"] == transport and len(pushed["servers"]) == 2
        assert all(server["ok"] for server in pushed["servers"])
    fleet.run("down")
    assert there(fleet) == []
