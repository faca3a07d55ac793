"""One real server over two machines, by vLLM's own `--nnodes`: addresses and homes of this one, an
ssh that is a script. In file order."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.remote_fleet import A, B
from tests.faults.ssh_fleet import HOSTS, SshFleet
from tests.integration.conftest import SERVER_ENVIRONMENT, needs_vllm
from tests.integration.endpoints import PROMPT, Endpoints, replicas
from tests.integration.fleet_cli import FEW_BLOCKS, UP_TIMEOUT_S, FleetCli
from tests.integration.reference import answered
from tests.pids import segments

pytestmark = [needs_vllm, pytest.mark.real, pytest.mark.beside]
TOKENS = 24
BACK_S = 240.0


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> SshFleet:
    return SshFleet(tmp_path_factory.mktemp("span"))


@pytest.fixture(scope="module")
def fleet(machines: SshFleet, checkpoints: dict[str, Path]) -> Iterator[FleetCli]:
    root = machines.directory
    ssh = {
        "hosts": HOSTS,
        "python": sys.executable,
        "command": [str(machines.write_ssh({}))],
        "orphan_grace_s": 60,
    }
    settings = {
        "name": "span",
        "model": str(checkpoints["a"]),
        "device": "cpu",
        "launcher": "ssh",
        "ssh": ssh,
        "pipeline_parallel_size": 2,
        "nodes_per_replica": 2,
        # what vLLM has compiled is in this user's home, and the machines have others
        "env": {
            "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": SERVER_ENVIRONMENT["OMP_NUM_THREADS"],
            "TORCHDYNAMO_DISABLE": "0",
        },
        "args": {"max-model-len": 512, "max-num-seqs": 16, **FEW_BLOCKS},
    }
    (root / "fleet.yaml").write_text(json.dumps(settings))  # JSON is YAML
    fleet = FleetCli(root, root / "home")
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        machines.end()


@pytest.fixture(scope="module")
def answer(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    """What each checkpoint answers where no server of ours has a part in it."""
    return {name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in checkpoints.items()}


def test_both_machines_have_a_part_and_the_tokens_are_those_of_one(
    fleet: FleetCli, machines: SshFleet, answer: dict[str, list[int]]
) -> None:
    (row,) = replicas(fleet).values()
    assert (row["node"], row["routed"]) == (", ".join(HOSTS), True)
    assert [len(machines.servers(address)) for address in (A, B)] == [1, 1]
    assert Endpoints(fleet).one_answer() == answer["a"]


def test_a_push_by_disk_reaches_both_and_is_verified(
    fleet: FleetCli, checkpoints: dict[str, Path], answer: dict[str, list[int]]
) -> None:
    result = fleet.data("sync-weights", str(checkpoints["b"]))["job"]["result"]
    assert result["transport"] == "disk"
    assert Endpoints(fleet).one_answer() == answer["b"]
    assert fleet.data("weights", "verify")["agree"] is True


def test_a_part_that_is_killed_brings_the_whole_back_with_the_weights_of_the_fleet(
    fleet: FleetCli, machines: SshFleet, answer: dict[str, list[int]]
) -> None:
    version = replicas(fleet)["span-0"]["weight_version"]
    ((follower,), (leader,)) = (machines.servers(address) for address in (B, A))
    worker = next(one for one in follower.children() if "Worker" in " ".join(one.cmdline()))
    trees = [*leader.children(recursive=True), *follower.children(recursive=True)]
    shared = segments(*(process.pid for process in trees))
    worker.kill()  # vLLM's leader would not notice before the next request, and then hang
    deadline = time.monotonic() + BACK_S
    while (row := replicas(fleet)["span-0"])["restarts"] == 0 or row["state"] != "ready":
        assert time.monotonic() < deadline, json.dumps(row, indent=1)
        time.sleep(0.5)
    assert f"its part on {HOSTS[1]} exited" in row["restart_reason"]
    assert not leader.is_running()
    assert [segment for segment in shared if segment.exists()] == []
    assert row["weight_version"] == row["reported_version"] == version
    assert Endpoints(fleet).one_answer() == answer["b"]


def test_down_leaves_nothing_on_either_machine(fleet: FleetCli, machines: SshFleet) -> None:
    trees = [
        process
        for address in (A, B)
        for server in machines.servers(address)
        for process in (server, *server.children(recursive=True))
    ]
    shared = segments(*(process.pid for process in trees))
    assert len(trees) >= 4 and shared
    fleet.run("down")
    assert [one for one in trees if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert machines.everything() == []
    assert [segment for segment in shared if segment.exists()] == []
