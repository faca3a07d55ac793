"""A fleet on a real Ray cluster: what is true of Ray alone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skyctl.errors import SkyctlError
from skyctl.launch.base import ADDRESS_AT_SPAWN, Node, RayCluster
from skyctl.launch.remote.session import ask, command_on, connection_environment
from tests.faults.ray_fleet import HEAD, RayFleet, why_no_cluster
from tests.faults.ray_fleet import RayCluster as Cluster
from tests.faults.remote_fleet import A, B

pytestmark = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())


@pytest.fixture
def fleet(cluster: Cluster, tmp_path: Path) -> Iterator[RayFleet]:
    fleet = RayFleet(tmp_path, cluster)
    yield fleet
    fleet.environ = dict(cluster.environ)
    fleet.end()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda fleet: fleet.environ.update(RAY_AUTH_TOKEN_PATH="/no/such/token"),
            "there is no token for the Ray cluster: without one, every process that reaches the "
            "cluster runs code there",
            id="no token",
        ),
        pytest.param(
            lambda fleet: fleet.environ.update(RAY_AUTH_TOKEN="w" * 32),
            "does not take our token",
            id="wrong token",
        ),
        pytest.param(
            lambda fleet: fleet.lay_out(address="127.0.0.4:9"),
            "no Ray cluster answers at 127.0.0.4:9: Connection refused",
            id="no cluster",
        ),
        pytest.param(
            lambda fleet: fleet.lay_out(nodes={"zone": "moon"}),
            "the Ray cluster has no node for servers with the labels zone: moon",
            id="no node",
        ),
        pytest.param(
            lambda fleet: fleet.lay_out(more="tensor_parallel_size: 3"),
            "stubs-0 needs 3 CPU, and no node of the Ray cluster has more than 2",
            id="too wide",
        ),
        pytest.param(
            lambda fleet: fleet.lay_out(5),
            "5 servers of 1 CPU each are more than the Ray cluster's nodes carry (2, 2)",
            id="too many",
        ),
        pytest.param(
            lambda fleet: fleet.lay_out(python="/no/such/python"),
            f"{A} has no Python at /no/such/python; {B} has no Python",
            id="python",
        ),
    ],
)
def test_nothing_is_started_where_the_cluster_lacks_something(
    fleet: RayFleet, spoil: Callable[[RayFleet], object], message: str
) -> None:
    fleet.lay_out()
    spoil(fleet)
    fleet.starts_nothing(message)


async def test_gpus_are_rays_to_give(
    fleet: RayFleet, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "tensor_parallel_size: 2"
    fleet.lay_out(more=text)
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("device: cpu", "device: cuda"))
    fleet.run("up")
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert {row["node"]: row["gpus"] for row in rows.values()} == {A: [0, 1], B: [0, 1]}
    for address in (A, B):
        (server,) = fleet.servers(address)
        environ = server.environ()
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1" and "OMP_NUM_THREADS" not in environ
        assert not [name for name in environ if name.startswith("RAY_")]
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    wanted = RayCluster(cluster.address, resource="GPU")
    node = Node("", ADDRESS_AT_SPAWN, str(fleet.directory / "python"), (), 60.0, wanted).cluster
    request = {"do": "place", "token": "more", "turn": 0, "patience_s": 1.0}
    with pytest.raises(SkyctlError, match=f"no node has 1 GPU free .*{A} 0 of 2, {B} 0 of 2"):
        await ask(node, request, 60)
    none = "no node of the Ray cluster has a GPU free for the sender"
    assert none in on_a_gpu(node).stderr
    fleet.run("down")
    assert cluster.groups() == []
    for _ in range(5):  # each gives back the one that it had
        gpu, word = on_a_gpu(node).stdout.split()
        assert gpu in ("0", "1") and word == "ready"


def on_a_gpu(node: Node) -> subprocess.CompletedProcess[str]:
    """Of a command that runs where Ray gives it a GPU, and repeats what it is told."""
    argv = ["sh", "-c", "read word; echo $CUDA_VISIBLE_DEVICES $word"]
    command = command_on(node.with_a_gpu, argv)
    environ = connection_environment()
    return subprocess.run(
        command, input="ready\n", env=environ, capture_output=True, text=True, timeout=60
    )


def test_a_server_outlives_its_actor(fleet: RayFleet) -> None:
    fleet.lay_out()
    fleet.run("up")
    before = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    (agent,) = fleet.agents(A)
    actor = agent.parent()
    assert actor is not None and actor.cmdline()[0].startswith("ray::")
    actor.kill()
    deadline = time.monotonic() + 30
    while agent.is_running() or len(fleet.agents(A)) != 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert {name: row["pid"] for name, row in rows.items()} == {
        name: row["pid"] for name, row in before.items()
    }


def test_servers_outlive_the_driver_which_ends_with_the_fleet(fleet: RayFleet) -> None:
    fleet.lay_out()
    fleet.run("up")
    before = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    (killed,) = fleet.drivers()
    killed.kill()
    deadline = time.monotonic() + 30
    while not all(len(fleet.agents(address)) == 1 for address in (A, B)) or not fleet.drivers():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert {name: row["pid"] for name, row in rows.items()} == {
        name: row["pid"] for name, row in before.items()
    }
    (driver,) = fleet.drivers()
    assert driver != killed
    fleet.run("down")
    driver.wait(5)


def test_servers_go_on_without_the_head(tmp_path: Path) -> None:
    alone = Cluster(open_to_all=True)
    fleet = RayFleet(tmp_path, alone)
    try:
        alone.begin(nodes=())
        fleet.lay_out(1, head=True)
        refused = fleet.json("up", expect=1)["error"]["message"]
        assert "the Ray cluster requires no token" in refused
        fleet.lay_out(1, grace_s=8, head=True, allow_unauthenticated=True)
        fleet.run("up")
        before = fleet.until({"stubs-0": "ready"})["stubs-0"]
        assert before["node"] == HEAD
        (gcs,) = [one for one in alone.processes() if one.name() == "gcs_server"]
        gcs.kill()
        for connection in fleet.connections(HEAD):
            connection.kill()
        time.sleep(12)  # more than its grace: it is asked, so somebody minds it
        row = fleet.replicas()["stubs-0"]
        assert (row["state"], row["pid"], row["routed"]) == ("ready", before["pid"], True)
        assert row["reason"] == f"no Ray cluster answers at {alone.address}: Connection refused"
        message = fleet.json("down", expect=1)["error"]["message"]
        assert "its server ends by itself after 8 s without us" in message
        deadline = time.monotonic() + 30
        while psutil.pid_exists(before["pid"]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        for record in (tmp_path / "home/remote").glob("*.json"):
            record.unlink()
        fleet.end()
        alone.end()
