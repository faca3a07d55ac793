"""An engine and a launcher that another package brings carry a fleet from `up` to `down`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import make_tiny_checkpoint
from tests.toys.launcher import NICENESS

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = """
[skyctl.engines]
toy = tests.toys.engine:TOY
[skyctl.launchers]
nice = tests.toys.launcher:NICE
"""
FLEET = """
name: toys
engine: toy
launcher: nice
model: some/model
router: {enabled: false}
health: {interval_s: 0.2}
drain_timeout_s: 1
"""


class ToyFleet:
    """The real command, where a package with the toys is installed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        installed = directory / "site" / "toys-1.0.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
        (installed / "entry_points.txt").write_text(ENTRY_POINTS)
        (directory / "fleet.yaml").write_text(FLEET)

    def run(self, *arguments: str, expect: int = 0) -> dict[str, Any]:
        path = os.pathsep.join([str(self.directory / "site"), str(ROOT)])
        environ = {**os.environ, "SKYCTL_HOME": str(self.directory / "home"), "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-m", "skyctl", *arguments, "--json"],
            cwd=self.directory,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        envelope: dict[str, Any] = json.loads(done.stdout)
        return envelope

    def replica(self) -> dict[str, Any]:
        row: dict[str, Any] = self.run("status")["data"]["replicas"][0]
        return row


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ToyFleet]:
    fleet = ToyFleet(tmp_path)
    yield fleet
    fleet.run("down")


def test_a_toy_fleet_comes_up_generates_freezes_thaws_and_goes_down(fleet: ToyFleet) -> None:
    fleet.run("up")
    row = fleet.replica()
    assert row["state"] == "ready"
    server = psutil.Process(row["pid"])
    assert server.nice() == min(psutil.Process().nice() + NICENESS, 19)
    assert "tests.toys.server" in server.cmdline()
    told = fleet.run("generate", "count", "--max-tokens", "3")["data"]
    assert [result["text"] for result in told["results"]] == ["1 2 3 "]
    fleet.run("pause")
    assert fleet.replica()["state"] == "paused"
    fleet.run("resume")
    assert fleet.replica()["state"] == "ready"
    fleet.run("down")
    assert not server.is_running()


def test_what_an_engine_lacks_is_refused_with_a_sentence(fleet: ToyFleet) -> None:
    fleet.run("up")
    before = fleet.replica()["pid"]
    refused = fleet.run("sleep", expect=2)["error"]
    assert refused["message"] == "toy servers have no sleep and wake"
    tiny = str(make_tiny_checkpoint(fleet.directory / "tiny", seed=1))
    refused = fleet.run("sync-weights", tiny, expect=2)["error"]
    assert refused["message"] == "toy servers have no weight pushes"
    file = fleet.directory / "fleet.yaml"
    file.write_text(FLEET.replace("router: {enabled: false}\n", ""))
    assert "no router for toy servers" in fleet.run("plan", expect=2)["error"]["message"]
    file.write_text(FLEET.replace("launcher: nice\n", ""))
    assert "started with launcher 'nice'" in fleet.run("up", expect=1)["error"]["message"]
    assert fleet.replica()["pid"] == before
    file.write_text(FLEET.replace("engine: toy", "engine: toi"))
    problem = fleet.run("validate", expect=2)["error"]["message"]
    assert "fleet.yaml:3: engine: there is no engine 'toi'; there are: sglang, toy, vllm" in problem
    file.write_text(FLEET)
