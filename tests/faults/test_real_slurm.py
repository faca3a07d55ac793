"""`launcher: ssh` with srun in ssh's place, inside a job of a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.slurm_fleet import NODES, SlurmFleet, running_slurm


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SlurmFleet]:
    with running_slurm(tmp_path) as fleet:
        yield fleet
        fleet.end()


def test_a_fleet_inside_a_slurm_job(fleet: SlurmFleet) -> None:
    more = "weight_transfer: {transport: shm}"
    fleet.lay_out(command=fleet.section["command"], hosts=("n1", "n9"), more=more)
    refused = fleet.json("up", expect=1)["error"]
    assert refused["message"].startswith("n9 cannot be asked over srun: srun: error: Unable to")
    assert refused["hint"].startswith("try it by hand: srun --overlap")
    fleet.lay_out(**fleet.section, python="/nowhere/python", more=more)
    refused = fleet.json("up", expect=1)["error"]
    assert refused["message"].startswith("n1 has no Python at /nowhere/python; n2 has no Python")
    fleet.lay_out(**fleet.section, more=more)
    fleet.run("up")
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert [row["node"] for row in rows.values()] == list(NODES)
    fleet.push("shm", "disk")  # by shm each node has a sender of its own
    # Slurm may end what a step leaves, the server too; then it starts again at these weights
    version = fleet.replicas()["stubs-1"]["weight_version"]
    for connection in fleet.tether("stubs-1").children():
        connection.kill()
    fleet.until({"stubs-1": "ready"}, weight_version=version)
    fleet.run("down")
    assert fleet.everything() == []
