"""The client of a Ray driver, with something else in the driver's place; no cluster takes part."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from skyctl.launch.base import RayCluster
from skyctl.launch.ray.client import DRIVERS_NAME, TAKEN
from skyctl.launch.ray.host import reap_drivers

NAME = f"skyctl-test-{secrets.token_hex(8)}"
CLIENT = [sys.executable, "-P", "-m", "skyctl.launch.ray.client"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{NAME}")
        listener.listen()
        listener.settimeout(20)
        yield listener


def started() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [*CLIENT, NAME, str(os.getpid()), "{}", "10.0.0.7", "true"]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def taken(listener: socket.socket) -> tuple[socket.socket, dict[str, object], list[int]]:
    channel, _ = listener.accept()
    line, pipes, *_ = socket.recv_fds(channel, 65536, 4)
    return channel, json.loads(line), pipes


def close(channel: socket.socket, *pipes: int) -> None:
    channel.close()
    for descriptor in pipes:
        os.close(descriptor)


def test_it_hands_its_pipes_over_and_ends_as_told(listener: socket.socket) -> None:
    client = started()
    channel, _, pipes = taken(listener)  # by a driver that is about to end
    close(channel, *pipes)
    channel, request, (stdin, stdout, stderr, holder) = taken(listener)
    wanted = {"cluster": {}, "address": "10.0.0.7", "command": "true"}
    assert request == {**wanted, "parent": os.getpid()}
    assert "Pid:" in Path(f"/proc/self/fdinfo/{holder}").read_text()
    channel.send(TAKEN)
    assert client.stdin is not None
    client.stdin.write("asked")
    client.stdin.close()
    assert os.read(stdin, 99) == b"asked"
    os.write(stdout, b"answered")
    channel.send(b"7")
    close(channel, stdin, stdout, stderr, holder)
    assert client.stdout is not None and client.stdout.read() == "answered"
    assert client.wait(20) == 7


def test_it_says_that_its_driver_has_ended(listener: socket.socket) -> None:
    client = started()
    channel, _, pipes = taken(listener)
    channel.send(TAKEN)
    close(channel, *pipes)
    assert client.stderr is not None
    assert client.stderr.read() == "the connection to Ray has ended\n"
    assert client.wait(20) == 1


_HANGS = f"""
import socket, sys, time
open("/proc/self/comm", "w").write("{DRIVERS_NAME}")
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listens", flush=True)
time.sleep(600)
"""
_HURRIED = """
import sys
from skyctl.launch.ray import client
client._TAKEN_S, client._CONNECTED_S = 2.0, float(sys.argv.pop(1))
client.main()
"""


@pytest.mark.parametrize("old", [True, False])
def test_a_driver_that_hangs_makes_room_once_it_cannot_be_connecting(
    old: bool, tmp_path: Path
) -> None:
    """A file takes what the client says: pipes are on their way to the driver until it ends."""
    name = f"{NAME}-{'old' if old else 'young'}"
    cluster = json.dumps(asdict(RayCluster("127.0.0.1:1")))
    asking = ["0" if old else "600", name, str(os.getpid()), cluster, "10.0.0.7", "true"]
    hanging = [sys.executable, "-c", _HANGS, name]
    with (
        subprocess.Popen(hanging, stdout=subprocess.PIPE) as driver,
        (tmp_path / "said").open("wb") as said,
    ):
        try:
            assert driver.stdout is not None and driver.stdout.readline() == b"listens\n"
            command = [sys.executable, "-c", _HURRIED, *asking]
            environ = {**os.environ, "HOME": str(tmp_path)}  # no token of this user's
            client = subprocess.Popen(command, stdout=said, stderr=said, env=environ)
            assert client.wait(60) == 1
            told = (tmp_path / "said").read_text()
            if old:  # by the driver in its place
                assert "there is no token" in told and driver.wait(20) == -signal.SIGKILL
            else:
                assert "does not answer" in told and driver.poll() is None
        finally:
            driver.kill()


def test_a_supervisor_waits_for_drivers_that_have_ended_and_for_nobody_elses() -> None:
    naming = "open('/proc/self/comm', 'w').write('{}')"
    names = (DRIVERS_NAME, "another")
    ended = [subprocess.Popen([sys.executable, "-c", naming.format(name)]) for name in names]
    for one in ended:
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    reap_drivers()
    assert [psutil.pid_exists(one.pid) for one in ended] == [False, True]
    assert ended[1].wait() == 0
