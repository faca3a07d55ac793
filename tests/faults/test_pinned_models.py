"""What `up` saw is what every server that starts later gets, though names may come to mean more."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import pids
from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

FIRST, LATER = "1" * 40, "2" * 40


def download(cache: Path, commit: str, seed: int) -> None:
    """As `hf download org/tiny` while that is the newest commit."""
    repository = cache / "models--org--tiny"
    write_checkpoint(repository / "snapshots" / commit, tiny_tensors(seed))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def until(fleet: StubFleet, name: str, *states: str) -> dict[str, object]:
    """The row of a replica, once it is in one of these states."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        row = fleet.replicas().get(name, {})
        if row.get("state") in states:
            return row
    raise AssertionError(f"{name} is {row.get('state')}: {row.get('reason')}")


def kill(fleet: StubFleet, name: str) -> None:
    """Kill a server and wait until another process has taken its place."""
    before = fleet.replicas()[name]["pid"]
    os.kill(before, signal.SIGKILL)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        row = fleet.replicas()[name]
        if row["pid"] not in (None, before) and row["state"] in ("ready", "quarantined"):
            return
    raise AssertionError(f"{name} did not come back: {row}")


@pytest.mark.parametrize("cached", [True, False])
def test_a_branch_that_moves_while_the_fleet_is_up_moves_no_server(
    tmp_path: Path, cached: bool
) -> None:
    cache = tmp_path / "hub"
    fleet = StubFleet(tmp_path, environ={"HF_HUB_CACHE": str(cache)})
    fleet.write(faults="{}" if cached else '{"startup_delay_s": 2}')
    file = tmp_path / "fleet.yaml"
    file.write_text(file.read_text().replace("./model", "org/tiny"))
    if cached:
        download(cache, FIRST, 1)
        fleet.run("up")
    else:
        up = fleet.start("up")
        while not (tmp_path / "home" / "fleets" / "stubs" / "logs" / "stubs-1.log").exists():
            time.sleep(0.05)
        download(cache, FIRST, 1)  # as the servers do
        assert up.wait(60) == 0
    try:
        download(cache, LATER, 2)
        kill(fleet, "stubs-0")
        assert fleet.json("weights", "verify")["data"]["agree"] is True
        assert {row["state"] for row in fleet.replicas().values()} == {"ready"}
        fleet.run("up")  # changes nothing
        pids = {row["pid"] for row in fleet.replicas().values()}
        fleet.run("scale", "3")
        assert pids < {row["pid"] for row in fleet.replicas().values()}
        assert fleet.json("weights", "verify")["data"]["agree"] is True
        status, plan = (fleet.json(command)["data"] for command in ("status", "plan"))
        assert status["base"] == plan["base"] == f"org/tiny@{FIRST}"
    finally:
        fleet.run("down")
    assert fleet.json("plan")["data"]["base"] == f"org/tiny@{LATER}"


def test_a_model_that_is_a_link_is_the_directory_that_it_led_to(tmp_path: Path) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write()
    file, latest = tmp_path / "fleet.yaml", tmp_path / "latest"
    file.write_text(file.read_text().replace("./model", str(latest)))
    for number in (1, 2):
        write_checkpoint(tmp_path / f"step-{number}", tiny_tensors(number))
    latest.symlink_to("step-1")
    fleet.run("up")
    try:
        latest.unlink()
        latest.symlink_to("step-2")
        assert fleet.json("status", "--exit-code")["data"]["drift"] == []  # `up` changes nothing
        pids.kill(fleet.json("status")["data"]["supervisor_pid"])  # its successor plans anew
        kill(fleet, "stubs-0")
        assert fleet.json("weights", "verify")["data"]["agree"] is True
        data = fleet.json("status")["data"]
        assert (data["base"], data["model"]) == (str(tmp_path / "step-1"), "latest")
    finally:
        fleet.run("down")


def test_gpu_servers_stay_on_their_gpus_while_the_driver_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\nfor gpu in 0 1 2; do echo $gpu, GPU-$gpu, Made Up, 81920; done\n")
    driver.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fleet = StubFleet(tmp_path, environ={"PATH": f"{driver.parent}:{os.environ['PATH']}"})
    fleet.write(extra="weight_transfer: {transport: disk}")
    file = tmp_path / "fleet.yaml"
    file.write_text(file.read_text().replace("device: cpu\n", ""))
    fleet.run("up")
    try:
        before = {name: row["pid"] for name, row in fleet.replicas().items()}
        driver.write_text("#!/bin/sh\nexit 15\n")  # as where one was lost
        for change in (["up"], ["scale", "3"]):
            error = fleet.json(*change, expect=2)["error"]
            assert "this machine has no NVIDIA GPU" in error["message"]
        assert {name: row["pid"] for name, row in fleet.replicas().items()} == before
    finally:
        fleet.run("down")
