"""The agent on its machine: what it finds there of servers that nobody came for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from skyctl.store.identity import ProcessIdentity, identify, own_identity
from skyctl.store.paths import FleetPaths
from tests.unit.store.disks import fill, mounted

GRACE_S = 60.0


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    """A server that runs on."""
    process = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "SKYCTL_TOKEN": "hosted-old"}, start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def ask(home: Path, **request: Any) -> list[dict[str, Any]]:
    """What an agent says to one request."""
    agent = subprocess.run(
        [sys.executable, "-m", "skyctl.launch.remote.agent"],
        input=f"{json.dumps(request)}\n",
        env={**os.environ, "SKYCTL_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert agent.returncode == 0, agent.stderr
    return [json.loads(line) for line in agent.stdout.splitlines() if line]


def started(home: Path) -> subprocess.Popen[str]:
    """An agent that is still to be asked."""
    return subprocess.Popen(
        [sys.executable, "-m", "skyctl.launch.remote.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SKYCTL_HOME": str(home)},
        text=True,
    )


def keeping(home: Path) -> tuple[subprocess.Popen[str], int]:
    """An agent that has started a server, and the server's pid."""
    new = {"env": {}, "closed": False, "closed_variables": [], "at": 0, "grace_s": GRACE_S}
    keep = {"do": "keep", "token": "hosted-new", "fresh": True, "argv": ["sleep", "600"], **new}
    agent = started(home)
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(json.dumps(keep) + "\n")
    agent.stdin.flush()
    reports = (json.loads(line) for line in iter(agent.stdout.readline, "") if "pid" in line)
    return agent, next(report["pid"] for report in reports if report["pid"] is not None)


@pytest.mark.parametrize(
    ("keeper_lives", "hours", "ended"),
    [
        pytest.param(False, 2, True, id="abandoned"),
        pytest.param(False, 0.5, False, id="somebody may come"),
        pytest.param(True, 2, False, id="its keeper lives"),
    ],
)
def test_what_died_with_its_machine_is_ended_by_the_next_to_come(
    tmp_path: Path,
    left: subprocess.Popen[bytes],
    keeper_lives: bool,
    hours: float,
    ended: bool,
) -> None:
    paths = FleetPaths(tmp_path / "hosted", "hosted-old")
    paths.prepare()
    directory, server = paths.directory, identify(left.pid)
    assert server is not None
    keeper = own_identity() if keeper_lives else ProcessIdentity(1, 0.0, "another boot")
    told = {"server": asdict(server), "keeper": asdict(keeper), "grace_s": GRACE_S}
    (directory / "server.json").write_text(json.dumps(told))
    lease = directory / "lease"
    lease.touch()
    then = time.time() - hours * 3600
    os.utime(lease, (then, then))
    new = {"argv": ["true"], "env": {}, "closed": False, "closed_variables": [], "at": 0}
    ask(tmp_path, do="keep", token="hosted-new", fresh=True, grace_s=GRACE_S, **new)
    ask(tmp_path, do="stop", token="hosted-new", timeout_s=5.0)
    assert directory.exists() is not ended
    assert (left.poll() is not None) is ended


def test_a_server_is_ended_where_nothing_can_be_written_of_it(
    tmp_path: Path, left: subprocess.Popen[bytes]
) -> None:
    """As on a disk without inodes. Whoever asked is told, and asks again."""
    paths = FleetPaths(tmp_path / "hosted", "hosted-old")
    paths.prepare()
    server, keeper = identify(left.pid), ProcessIdentity(1, 0.0, "another boot")
    assert server is not None
    told = {"server": asdict(server), "keeper": asdict(keeper), "grace_s": GRACE_S}
    (paths.directory / "server.json").write_text(json.dumps(told))
    mark = tmp_path / "hosted/hosted-old.stopped"
    mark.mkdir()
    _, answer = ask(tmp_path, do="stop", token="hosted-old", timeout_s=5.0)
    assert f"cannot open {mark}" in answer["error"]
    assert left.poll() is not None and not paths.directory.exists()
    mark.rmdir()
    _, answer = ask(tmp_path, do="stop", token="hosted-old", timeout_s=5.0)
    assert answer == {"gently": True} and mark.is_file()


def test_a_server_that_is_being_ended_is_not_kept_by_a_message_that_comes_just_then(
    tmp_path: Path,
) -> None:
    agent, _ = keeping(tmp_path)
    assert agent.stdin is not None and agent.stdout is not None
    (tmp_path / "hosted/fleets/hosted-new/lease").unlink()  # the first thing that goes
    agent.stdin.write('{"closed": false}\n')
    agent.stdin.flush()
    assert any("ended" in line for line in iter(agent.stdout.readline, ""))
    agent.communicate(timeout=30)


def test_a_server_outlives_a_moment_in_which_its_lease_cannot_be_read(tmp_path: Path) -> None:
    """As where its directory is on a network file system."""
    agent, pid = keeping(tmp_path)
    assert agent.stdin is not None
    lease = tmp_path / "hosted/fleets/hosted-new/lease"
    kept, loop = lease.with_name("kept"), lease.with_name("loop")
    os.link(lease, kept)
    loop.symlink_to(lease)
    loop.replace(lease)  # to itself: it is there, and reading it fails
    time.sleep(1.0)  # its keeper looks five times
    kept.replace(lease)
    agent.stdin.close()
    agent.wait(timeout=30)
    assert identify(pid) is not None
    ask(tmp_path, do="stop", token="hosted-new", timeout_s=5.0)
    assert identify(pid) is None


def test_a_server_is_not_started_where_nothing_could_be_told_of_it(tmp_path: Path) -> None:
    """On a full disk; and one that runs as the disk fills still says how it ended."""
    new = {"env": {}, "closed": False, "closed_variables": [], "at": 0, "grace_s": GRACE_S}
    with mounted(tmp_path / "home") as home:
        FleetPaths(home / "hosted", "hosted-new").prepare()
        filler = fill(home)
        keep = {"do": "keep", "token": "hosted-new", "fresh": True, **new}
        _, answer = ask(home, argv=["true"], **keep)
        assert answer["error"].endswith("hosted-new: No space left on device")
        filler.unlink()
        fills = f"while [ ! -e {tmp_path}/full ]; do sleep 0.1; done; exit 3"
        agent = started(home)
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(json.dumps({"argv": ["sh", "-c", fills], **keep}) + "\n")
        agent.stdin.flush()
        said = iter(agent.stdout.readline, "")
        assert any('"pid"' in line for line in said)
        fill(home)
        (tmp_path / "full").touch()
        ended = [json.loads(line)["ended"] for line in said if "ended" in line]
        assert ended[0].startswith("exited with code 3")
        agent.communicate(timeout=30)
        ask(home, do="stop", token="hosted-new", timeout_s=5.0)
