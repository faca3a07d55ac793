"""Real servers on two machines, behind the real router: nodes of a real Ray cluster, or addresses
that a real sshd listens on. In file order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.faults.ray_fleet import RayFleet, has_ray, running_cluster
from tests.faults.remote_fleet import A, B
from tests.faults.sshd_fleet import SshdFleet, running_sshd
from tests.integration.conftest import SERVER_ENVIRONMENT, needs_vllm
from tests.integration.endpoints import (
    LONG,
    PROMPT,
    Endpoints,
    frozen_generation,
    replicas,
    wait_until,
)
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, greedy
from tests.integration.reference import PROMPTS, Reference, answered
from tests.integration.reference import TOKENS as ADAPTER_TOKENS
from tests.integration.two_servers import write_two
from tests.pids import segments

pytestmark = [needs_vllm, pytest.mark.real, pytest.mark.beside]
TOKENS = 24
BACK_S = 240.0


@pytest.fixture(scope="module")
def answer(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    """What each checkpoint answers where nothing was pushed."""
    return {name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module", params=["ray", "ssh"])
def machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayFleet | SshdFleet]:
    directory = tmp_path_factory.mktemp("machines")
    if request.param == "ssh":
        with running_sshd(directory) as machines:
            machines.trust()
            yield machines
        return
    if not has_ray():
        pytest.skip("ray is not installed")
    with running_cluster() as cluster:
        yield RayFleet(directory, cluster)


@pytest.fixture(scope="module")
def fleet(machines: RayFleet | SshdFleet, checkpoints: dict[str, Path]) -> Iterator[FleetCli]:
    root = machines.directory
    fleet = FleetCli(root, root / "home", machines.environ)
    section = {**machines.section, "python": sys.executable, "orphan_grace_s": 60}
    (root / "shared").mkdir()
    write_two(
        fleet,
        checkpoints["a"],
        env=SERVER_ENVIRONMENT,  # sshd and Ray do not pass on ours
        launcher=machines.launcher,
        **{machines.launcher: section},
        weight_transfer={"transport": "shm"},
        shared_dir=str(root / "shared"),
        lora={"max_rank": 8},
    )
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        machines.end()


def test_each_server_is_at_the_address_of_a_machine_of_its_own(
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


def test_an_adapter_is_read_on_every_machine(fleet: FleetCli, reference: Reference) -> None:
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
        result = push(fleet, checkpoints[name], transport)
        assert result["transport"] == transport.replace("auto", "shm")
        assert Endpoints(fleet).one_answer() == answer[name]
    assert fleet.data("weights", "verify")["agree"] is True


def push(fleet: FleetCli, checkpoint: Path, transport: str) -> dict[str, Any]:
    asked = ("sync-weights", str(checkpoint), "--transport", transport)
    result: dict[str, Any] = fleet.data(*asked)["job"]["result"]
    return result


def test_the_server_of_a_lost_machine_is_back_with_the_weights_of_the_fleet(
    fleet: FleetCli,
    machines: RayFleet | SshdFleet,
    answer: dict[str, list[int]],
    reference: Reference,
) -> None:
    endpoints, before = Endpoints(fleet), replicas(fleet)
    (name,) = [name for name, row in before.items() if row["node"] == B]
    version = before[name]["weight_version"]
    machines.lose(B)
    wait_until(lambda: not replicas(fleet)[name]["routed"], 60, f"{name} is not routed")
    heard = {tuple(endpoints.routed(TOKENS))}
    node, why = A, f"Ray says that {B} is dead"
    if isinstance(machines, SshdFleet):  # nothing is started elsewhere: it may be cut off alone
        machines.boot(B)
        node, why = B, "exited"
    deadline = time.monotonic() + BACK_S
    while not (row := replicas(fleet)[name])["routed"]:
        assert time.monotonic() < deadline, json.dumps(row, indent=1)
        heard.add(tuple(endpoints.routed(TOKENS)))
        time.sleep(0.5)
    assert (row["node"], row["state"], row["restarts"]) == (node, "ready", 1)
    assert why in row["restart_reason"]
    assert row["weight_version"] == row["reported_version"] == version
    assert heard == {tuple(answer["b"])}
    assert Endpoints(fleet).one_answer() == answer["b"]
    assert adapter_answers(fleet) == reference.tokens("b", "x1")
    assert fleet.data("weights", "verify")["agree"] is True


def test_a_push_reaches_that_server_as_well(
    fleet: FleetCli, checkpoints: dict[str, Path], answer: dict[str, list[int]]
) -> None:
    for name, transport in (("a", "shm"), ("b", "gloo")):
        assert push(fleet, checkpoints[name], transport)["transport"] == transport
        assert Endpoints(fleet).one_answer() == answer[name]


def test_down_leaves_nothing_on_any_machine(
    fleet: FleetCli, machines: RayFleet | SshdFleet
) -> None:
    servers = [psutil.Process(row["pid"]) for row in replicas(fleet).values()]
    trees = [*servers, *(one for server in servers for one in server.children(recursive=True))]
    shared = segments(*(process.pid for process in trees))  # a server may have none
    assert len(trees) > len(servers) and machines.everything()
    fleet.run("down")
    assert [one for one in trees if one.is_running() and one.status() != "zombie"] == []
    assert machines.everything() == []
    assert [segment for segment in shared if segment.exists()] == []
    assert list(fleet.directory.glob("shared/*")) == []
    if isinstance(machines, RayFleet):
        assert machines.cluster.groups() == []
    else:  # a lost node has kept its files
        assert list(machines.hosts.glob("*/.local/state/skyctl/hosted/fleets/*")) == []
