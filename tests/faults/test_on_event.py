"""`on_event:` of a fleet file, from the real supervisor of stub servers."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

KINDS = ("push_succeeded", "push_failed", "replica_ready", "process_died", "operation_done")
EXTRA = f"""
weight_transfer: {{transport: disk}}
router: {{enabled: false}}
on_event:
{"".join(f"  {kind}: cat >> events{chr(10)}" for kind in KINDS)}"""


def until(fleet: StubFleet, kind: str, **details: Any) -> dict[str, Any]:
    """The first event of that kind with these details."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        file = fleet.directory / "events"
        lines = file.read_text().splitlines() if file.exists() else []
        for event in map(json.loads, lines):
            if event["event"] == kind and details.items() <= event.items():
                return dict(event)
        time.sleep(0.1)
    raise AssertionError(f"no {kind} {details} among {lines}")


def test_commands_run_on_the_events_of_a_fleets_life(tmp_path: Path) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write(replicas=1, extra=EXTRA)
    fleet.run("up")
    try:
        until(fleet, "replica_ready", subject="stubs-0")
        until(fleet, "operation_done", operation="up")
        write_checkpoint(tmp_path / "step", tiny_tensors(1))
        fleet.run("sync-weights", "step", "--weight-version", "step-1")
        until(fleet, "push_succeeded", job="push-1", version="step-1")
        (tmp_path / "step" / "model.safetensors").write_bytes(b"")
        fleet.run("sync-weights", "step", expect=1)
        until(fleet, "push_failed", job="push-2")
        os.kill(fleet.replicas()["stubs-0"]["pid"], signal.SIGKILL)
        until(fleet, "process_died", subject="stubs-0")
        # a change of a command restarts nothing, and holds at once
        fleet.write(replicas=1, extra=EXTRA + "  operation_failed: 'false'\n")
        assert "nothing to do" in fleet.run("up").stderr
        assert not fleet.json("status")["data"]["unapplied"]
    finally:
        fleet.run("down")


def test_a_misspelled_event_is_named_and_a_fleet_without_supervisor_has_none(
    tmp_path: Path,
) -> None:
    fleet = StubFleet(tmp_path)
    fleet.write(extra="on_event: {push_suceeded: x}")
    refused = fleet.run("validate", expect=2).stderr
    assert "unknown key 'push_suceeded'; did you mean 'push_succeeded'?" in refused
    (tmp_path / "fleet.yaml").write_text(
        "name: a\nservers: [http://127.0.0.1:1]\non_event: {push_failed: x}\n"
    )
    assert (
        "`on_event` goes with servers that skyctl starts" in fleet.run("validate", expect=2).stderr
    )
