"""Real servers on two machines that the real ssh and sshd reach, behind the real router. In file
order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.real_sshd import HOSTS, RealSshd, running_sshd
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.reference import answered
from tests.integration.test_real_fleet import LONG, PROMPT, Endpoints, frozen_generation, replicas
from tests.integration.two_servers import write_two

pytest.importorskip("vllm")
pytestmark = [pytest.mark.real, pytest.mark.beside]
TOKENS = 24
BACK_S = 240.0


@pytest.fixture(scope="module")
def answer(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    """What each checkpoint answers where nothing was pushed."""
    return {name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as found:
        found.trust()
        yield found


@pytest.fixture(scope="module")
def fleet(sshd: RealSshd, checkpoints: dict[str, Path]) -> Iterator[FleetCli]:
    fleet = FleetCli(sshd.directory / "fleet", sshd.directory / "home")
    fleet.directory.mkdir()
    ssh = {"hosts": list(HOSTS), "python": sys.executable, "command": sshd.command}
    write_two(
        fleet,
        checkpoints["a"],
        launcher="ssh",
        ssh={**ssh, "orphan_grace_s": 60},
        weight_transfer={"transport": "shm"},
    )
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)


def test_each_machine_has_a_server_and_a_frozen_generation_goes_on(
    fleet: FleetCli, answer: dict[str, list[int]]
) -> None:
    assert [row["node"] for row in replicas(fleet).values()] == list(HOSTS)
    endpoints = Endpoints(fleet)
    assert endpoints.one_answer() == answer["a"]
    undisturbed = endpoints.routed(LONG)
    stream = frozen_generation(fleet, endpoints)
    assert not stream.grows_within(2.0)
    fleet.run("resume")
    assert stream.result() == undisturbed


@pytest.mark.parametrize(("name", "transport"), [("b", "shm"), ("a", "gloo"), ("b", "disk")])
def test_a_push_brings_what_the_checkpoint_answers(
    fleet: FleetCli,
    checkpoints: dict[str, Path],
    answer: dict[str, list[int]],
    name: str,
    transport: str,
) -> None:
    asked = ("sync-weights", str(checkpoints[name]), "--transport", transport)
    assert fleet.data(*asked)["job"]["result"]["transport"] == transport
    assert Endpoints(fleet).one_answer() == answer[name]
    assert fleet.data("weights", "verify")["agree"] is True


def test_a_lost_machine_that_boots_again_serves_the_weights_of_the_fleet(
    fleet: FleetCli, sshd: RealSshd, answer: dict[str, list[int]]
) -> None:
    endpoints, before = Endpoints(fleet), replicas(fleet)
    (name,) = [name for name, row in before.items() if row["node"] == HOSTS[1]]
    sshd.lose(HOSTS[1])
    _until(fleet, name, routed=False)
    assert endpoints.routed(TOKENS) == answer["b"]  # the other one serves on
    sshd.boot(HOSTS[1])
    heard: set[tuple[int, ...]] = set()
    deadline = time.monotonic() + BACK_S
    while not (row := replicas(fleet)[name])["routed"]:
        assert time.monotonic() < deadline, json.dumps(row, indent=1)
        heard.add(tuple(endpoints.routed(TOKENS)))
        time.sleep(0.5)
    assert (row["state"], row["node"]) == ("ready", HOSTS[1])
    assert row["pid"] != before[name]["pid"]
    assert row["weight_version"] == row["reported_version"] == before[name]["weight_version"]
    assert heard == {tuple(answer["b"])} and Endpoints(fleet).one_answer() == answer["b"]


def _until(fleet: FleetCli, name: str, *, routed: bool) -> None:
    deadline = time.monotonic() + BACK_S
    while replicas(fleet)[name]["routed"] is not routed:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_down_leaves_nothing_on_either_machine(fleet: FleetCli, sshd: RealSshd) -> None:
    servers = [psutil.Process(row["pid"]) for row in replicas(fleet).values()]
    trees = [*servers, *(one for server in servers for one in server.children(recursive=True))]
    assert len(trees) > len(servers)
    fleet.run("down")
    assert [one for one in trees if one.is_running() and one.status() != "zombie"] == []
    assert sshd.running() == []
