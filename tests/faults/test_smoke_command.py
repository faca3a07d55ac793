"""`skyctl smoke` as CI runs it, on stubs that do what they should, and on stubs that do not."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.faults.stub_fleet import StubFleet, until_said
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

EXTRA = "args: {token-delay-s: 0.005}\nweight_transfer: {transport: disk}"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    write(fleet)
    yield fleet
    if (tmp_path / "home").exists():
        write(fleet)
        fleet.run("down", "--drain-timeout", "0")


def write(fleet: StubFleet, faults: str = "{}") -> None:
    """A fleet that pushes from disk, of a checkpoint that is one."""
    fleet.write(replicas=2, faults=faults, extra=EXTRA)
    write_checkpoint(fleet.directory / "model")
    write_checkpoint(fleet.directory / "b", tiny_tensors(9))


def test_a_fleet_that_does_everything_passes_and_leaves_nothing(fleet: StubFleet) -> None:
    done = fleet.run("smoke", "--checkpoint", "b", "--junit", "out/smoke.xml", "--summary", "s.md")
    assert "8 of 8 steps passed" in done.stdout
    assert "answers changed on 2 of 2 servers" in done.stdout
    assert "pause-resume …" in done.stderr and "…" not in done.stdout
    suite = ElementTree.parse(fleet.directory / "out/smoke.xml").getroot()[0]
    assert [case.get("name") for case in suite] == [
        *("up", "generate", "pause-resume", "push-same", "push-other", "push-back"),
        *("verify", "down"),
    ]
    assert "### ✅ Fleet `stubs` passed" in (fleet.directory / "s.md").read_text()
    assert fleet.json("status")["data"]["health"] == "down"


def test_a_server_that_cannot_resume_fails_the_run_and_its_logs_are_kept(fleet: StubFleet) -> None:
    write(fleet, '{"/resume": {"kind": "status"}}')
    envelope = fleet.json("smoke", "--keep-logs", "kept", "--junit", "smoke.xml", expect=1)
    steps = {step["name"]: step["status"] for step in envelope["data"]["steps"]}
    assert steps == {
        "up": "passed",
        "generate": "passed",
        "pause-resume": "failed",
        "push-same": "skipped",
        "verify": "skipped",
        "down": "passed",
    }
    assert "injected fault" in envelope["error"]["message"]
    kept = {path.name for path in (fleet.directory / "kept").iterdir()}
    assert kept >= {
        *("stubs-0.log", "stubs-1.log", "router.log", "supervisor.log"),
        *("status.json", "fleet.yaml"),
    }
    status = json.loads((fleet.directory / "kept/status.json").read_text())
    assert {replica["state"] for replica in status["replicas"]} == {"paused"}
    assert "stubs-0" in (fleet.directory / "smoke.xml").read_text()
    assert fleet.json("status")["data"]["health"] == "down"


def test_a_fleet_that_does_not_start_fails_with_the_end_of_its_log(fleet: StubFleet) -> None:
    write(fleet, '{"exit_at_start": 3}')
    failed = fleet.run("smoke", "--summary", "s.md", expect=1)
    assert "exited with code 3" in failed.stderr
    assert "told to exit at start" in (fleet.directory / "s.md").read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_cancelled_job_take_the_fleet_down(fleet: StubFleet, sent: int) -> None:
    write(fleet, '{"/v1/completions": {"kind": "hang"}}')
    smoke = fleet.start("smoke")
    until_said(smoke, "generate …")
    smoke.send_signal(sent)
    smoke.communicate(timeout=60)
    assert smoke.returncode == 130
    assert fleet.json("status")["data"]["health"] == "down"


def test_a_running_fleet_is_refused_unless_it_is_to_be_reused(fleet: StubFleet) -> None:
    fleet.run("up")
    refused = fleet.json("smoke", expect=1)
    assert refused["error"]["kind"] == "ConflictError"
    assert "--reuse" in refused["error"]["hint"]
    pids = {row["pid"] for row in fleet.replicas().values()}
    fleet.run("sync-weights", "b", "--weight-version", "blue")
    # what it has is compared with itself, not with what it was started with
    fleet.run("smoke", "--reuse", "--checkpoint", "model")
    assert {row["pid"] for row in fleet.replicas().values()} == pids
    assert {row["weight_version"] for row in fleet.replicas().values()} == {"blue"}
