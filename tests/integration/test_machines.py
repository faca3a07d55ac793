"""Real servers on the nodes of a real Ray cluster, behind the real router. In file order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.faults.ray_fleet import RayCluster, RayFleet, has_ray, running_cluster
from tests.faults.remote_fleet import A, B
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, greedy
from tests.integration.reference import answered
from tests.integration.test_adapters import PROMPTS, Reference
from tests.integration.test_adapters import TOKENS as ADAPTER_TOKENS
from tests.integration.test_real_fleet import LONG, PROMPT, Endpoints, frozen_generation, replicas
from tests.integration.two_servers import write_two

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.real,
    pytest.mark.beside,
    pytest.mark.skipif(not has_ray(), reason="ray is not installed"),
]
TOKENS = 24
BACK_S = 240.0


@pytest.fixture(scope="module")
def answer(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    """What each checkpoint answers where nothing was pushed."""
    return {name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fleet(
    cluster: RayCluster,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[FleetCli]:
    root = tmp_path_factory.mktemp("machines")
    fleet = FleetCli(root, root / "home", dict(cluster.environ))
    ray = {"address": cluster.address, "python": sys.executable}
    (root / "shared").mkdir()
    write_two(
        fleet,
        checkpoints["a"],
        launcher="ray",
        ray=ray,
        weight_transfer={"transport": "shm"},
        shared_dir=str(root / "shared"),
        lora={"max_rank": 8},
    )
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        RayFleet(root, cluster).end()


def test_each_server_is_at_the_address_of_a_node_of_its_own(
    fleet: FleetCli, answer: dict[str, list[int]]
) -> None:
    rows = replicas(fleet)
    assert sorted(row["node"] for row in rows.values()) == [A, B]
    for row in rows.values():
        listening = [
            one.laddr.ip
            for one in psutil.Process(row["pid"]).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        assert listening and set(listening) == {row["node"]} == {urlsplit(row["url"]).hostname}
        assert row["routed"] is True
    assert Endpoints(fleet).one_answer() == answer["a"]


def test_a_frozen_generation_goes_on_with_the_same_tokens(fleet: FleetCli) -> None:
    endpoints = Endpoints(fleet)
    undisturbed = endpoints.routed(LONG)
    stream = frozen_generation(fleet, endpoints)
    assert not stream.grows_within(2.0)
    assert {row["state"] for row in replicas(fleet).values()} == {"paused"}
    fleet.run("resume")
    assert stream.result() == undisturbed


def test_an_adapter_is_read_on_every_node(fleet: FleetCli, reference: Reference) -> None:
    fleet.run("adapters", "load", "x", str(reference.root / "x1"), "--any-base")
    assert adapter_answers(fleet) == reference.tokens("a", "x1") != reference.tokens("a")
    assert [path.name for path in fleet.directory.glob("shared/two-*/*")] == ["adapters"]


def adapter_answers(fleet: FleetCli) -> list[list[int]]:
    """By the router, which takes turns: both servers answer each prompt."""
    endpoints = Endpoints(fleet)
    first, second = (
        [greedy(endpoints.router, "x", one, ADAPTER_TOKENS, key=endpoints.key) for one in PROMPTS]
        for _ in range(2)
    )
    assert first == second
    return first


def test_a_push_brings_what_the_checkpoint_answers(
    fleet: FleetCli, checkpoints: dict[str, Path], answer: dict[str, list[int]]
) -> None:
    pushes = (("b", "shm"), ("a", "disk"), ("b", "gloo"), ("a", "gloo"), ("b", "auto"))
    for name, transport in pushes:
        asked = ("sync-weights", str(checkpoints[name]), "--transport", transport)
        result = fleet.data(*asked)["job"]["result"]
        assert result["transport"] == transport.replace("auto", "shm")
        assert Endpoints(fleet).one_answer() == answer[name]
    assert fleet.data("weights", "verify")["agree"] is True


def test_a_server_of_a_lost_node_is_back_on_another_with_the_weights_of_the_fleet(
    fleet: FleetCli, cluster: RayCluster, answer: dict[str, list[int]], reference: Reference
) -> None:
    endpoints, before = Endpoints(fleet), replicas(fleet)
    (name,) = [name for name, row in before.items() if row["node"] == B]
    version = before[name]["weight_version"]
    cluster.lose(B)
    heard: set[tuple[int, ...]] = set()
    deadline = time.monotonic() + BACK_S
    while (row := replicas(fleet)[name])["node"] != A or not row["routed"]:
        assert time.monotonic() < deadline, json.dumps(row, indent=1)
        try:
            heard.add(tuple(endpoints.routed(TOKENS)))
        except httpx.HTTPError:  # sent to the lost one, before that is noticed
            assert row["restarts"] == 0 or row["state"] != "ready", row
        time.sleep(0.5)
    assert (row["state"], row["restarts"]) == ("ready", 1)
    assert f"Ray says that {B} is dead" in row["restart_reason"]
    assert row["weight_version"] == row["reported_version"] == version
    assert heard == {tuple(answer["b"])}
    assert Endpoints(fleet).one_answer() == answer["b"]
    assert adapter_answers(fleet) == reference.tokens("b", "x1")
    assert fleet.data("weights", "verify")["agree"] is True


def test_down_leaves_no_process_and_no_reservation(fleet: FleetCli, cluster: RayCluster) -> None:
    servers = [psutil.Process(row["pid"]) for row in replicas(fleet).values()]
    trees = [*servers, *(one for server in servers for one in server.children(recursive=True))]
    assert len(trees) > len(servers) and cluster.groups()
    fleet.run("down")
    assert [one for one in trees if one.is_running() and one.status() != "zombie"] == []
    assert RayFleet(fleet.directory, cluster).everything() == []
    assert cluster.groups() == []
    assert list(fleet.directory.glob("shared/*")) == []
