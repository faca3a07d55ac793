"""Machines with networks of their own, where no address of one is another's: what loopback hides.

Each is a network namespace, and so is the one that commands run in; a veth pair joins any two.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests import forking
from tests.faults.ssh_fleet import SshFleet
from tests.tiny import make_tiny_checkpoint

HERE, *MACHINES = ("10.77.0.1", "10.77.1.1", "10.77.2.1", "10.77.3.1")


@pytest.fixture(scope="module", autouse=True)
def senders_have_torch() -> Iterator[None]:
    forking.use(servers=forking.TORCH)
    yield
    forking.use()


def holder() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which ends with it."""
    argv = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        pytest.skip("there is no unshare on this machine")
    assert process.stdout is not None
    if process.stdout.readline() != b"up\n":
        process.wait()
        pytest.skip("this machine lets nobody make a network namespace")
    return process


def within(pid: int) -> list[str]:
    """What comes before a command that runs in the network of a process."""
    return ["nsenter", "--net", f"--target={pid}"]


def link(address: str) -> str:
    """Name of the interface by which a machine is reached."""
    return "to" + address.replace(".", "")


def configure(network: int, line: str) -> None:
    argv = [*within(network), "ip", *line.split()]
    if subprocess.run(argv, stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"this machine does not allow: ip {line}")


@pytest.fixture
def networks() -> Iterator[dict[str, int]]:
    """By address, a process whose network is the one there."""
    holders: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for address in (HERE, *MACHINES):
            holders[address] = holder()
            configure(holders[address].pid, f"address add {address}/32 dev lo")
        for one, other in combinations(holders, 2):
            ends = (link(other), link(one))
            peer = f"peer name {ends[1]} netns {holders[other].pid}"
            configure(holders[one].pid, f"link add {ends[0]} type veth {peer}")
            for own, end, there in ((one, ends[0], other), (other, ends[1], one)):
                configure(holders[own].pid, f"link set {end} up")
                configure(holders[own].pid, f"route add {there} dev {end} src {own}")
        yield {address: process.pid for address, process in holders.items()}
    finally:
        for process in holders.values():
            process.kill()
            process.communicate()


def test_a_fleet_over_machines_that_share_no_address(
    networks: dict[str, int], tmp_path: Path
) -> None:
    fleet = SshFleet(tmp_path, network=networks[HERE])
    fleet.addresses = tuple(MACHINES)
    hosts = [f"me@{address}" for address in MACHINES]
    transfer = "weight_transfer: {transport: shm}"
    fleet.lay_out(
        3,
        hosts=hosts,
        within={address: within(pid) for address, pid in networks.items()},
        more=transfer,
        faults='{"joins": true}',
    )
    try:
        fleet.run("up")
        rows = fleet.until({f"stubs-{number}": "ready" for number in range(3)})
        assert [urlsplit(row["url"]).hostname for row in rows.values()] == [
            row["node"].removeprefix("me@") for row in rows.values()
        ]
        assert {row["node"] for row in rows.values()} == set(hosts)
        for row in rows.values():
            beside = Path(f"/proc/{row['pid']}/ns/net").readlink()
            assert beside != Path(f"/proc/{psutil.Process().pid}/ns/net").readlink()
        assert all(row["routed"] for row in rows.values())
        checkpoint = make_tiny_checkpoint(tmp_path / "tiny", seed=1)
        for transport in ("gloo", "shm", "disk"):
            asked = ("sync-weights", str(checkpoint), "--transport", transport)
            pushed = fleet.json(*asked)["data"]["job"]["result"]
            assert (pushed["transport"], len(pushed["servers"])) == (transport, 3)
            assert {row["reported_version"] for row in fleet.replicas().values()} == {
                pushed["version"]
            }
        fleet.run("down")
        assert fleet.everything() == []
    finally:
        fleet.end()


def test_a_broadcast_whose_sender_died_with_its_machine_goes_on_from_another(
    networks: dict[str, int], tmp_path: Path
) -> None:
    fleet = SshFleet(tmp_path, network=networks[HERE])
    fleet.addresses = tuple(MACHINES)
    dead, *others = MACHINES
    fleet.lay_out(
        3,
        hosts=[f"me@{address}" for address in MACHINES],
        within={address: within(pid) for address, pid in networks.items()},
        more="weight_transfer: {transport: gloo, update_timeout_s: 5}\ncontrol_timeout_s: 4",
        faults='{"joins": true, "/update_weights": {"kind": "delay", "seconds": 0.3}}',
    )
    try:
        fleet.run("up")
        rows = fleet.until({f"stubs-{number}": "ready" for number in range(3)})
        by_address = {row["node"].removeprefix("me@"): name for name, row in rows.items()}
        assert by_address[dead] == "stubs-0"
        checkpoint = make_tiny_checkpoint(tmp_path / "tiny", seed=1)
        pushing = fleet.start("sync-weights", str(checkpoint), "--chunk-size", "100KB", "--json")
        until_loading(tmp_path)
        for own in (HERE, *others):
            configure(networks[own], f"link set {link(dead)} down")
        fleet.cut(dead)
        answered = pushing.communicate(timeout=120)[0]
        after = fleet.replicas()
        (version,) = {after[by_address[address]]["reported_version"] for address in others}
        assert pushing.returncode == 1, answered
        assert version.startswith("tiny@")
        assert "stubs-0 quarantined" in json.loads(answered)["error"]["message"]
    finally:
        fleet.end()


def until_loading(directory: Path, timeout_s: float = 60) -> None:
    """Wait until a server has loaded its first chunk, as the servers' logs say."""
    deadline = time.monotonic() + timeout_s
    while not any("/update_weights" in log.read_text() for log in directory.rglob("*.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
