"""Weights out of a running server: saved as a checkpoint, and into a sibling that restarts."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.endpoints import PROMPT, TOKENS, answers
from tests.integration.fleet_cli import FleetCli
from tests.integration.reference import answered

pytestmark = pytest.mark.real


def served(fleet: FleetCli) -> dict[str, str]:
    return {row["server"]: row["weights_digest"] for row in fleet.data("weights")["servers"]}


def test_what_is_saved_is_what_was_pushed_and_a_server_takes_it_back(real_fleet: FleetCli) -> None:
    for name in ("a", "b"):
        original = real_fleet.directory / "checkpoints" / name
        real_fleet.run("sync-weights", str(original))
        pushed, digests = answers(real_fleet), served(real_fleet)
        saved = real_fleet.directory / f"saved-{name}"
        made = real_fleet.data("weights", "save", str(saved))
        assert made["weights_digest"] in digests.values()
        tensors, expected = (load_file(d / "model.safetensors") for d in (saved, original))
        assert tensors.keys() == expected.keys()
        for tensor in tensors:
            assert tensors[tensor].equal(expected[tensor].to(tensors[tensor].dtype)), tensor
        assert answered(saved, PROMPT, TOKENS) == pushed[0]
        real_fleet.run("sync-weights", str(saved))
        assert served(real_fleet) == digests
        assert answers(real_fleet) == pushed


def test_a_replica_that_restarts_takes_weights_that_no_file_has_from_its_sibling(
    real_fleet: FleetCli, tmp_path: Path
) -> None:
    step = tmp_path / "step"
    shutil.copytree(real_fleet.directory / "checkpoints" / "b", step)
    real_fleet.run("sync-weights", str(step), "--weight-version", "gone")
    pushed, digests = answers(real_fleet), served(real_fleet)
    shutil.rmtree(step)
    victim = real_fleet.data("status")["replicas"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    until = time.monotonic() + 180
    while time.monotonic() < until:
        replica = real_fleet.data("status", expect=None)["replicas"][0]
        if replica["pid"] not in (None, victim["pid"]) and replica["state"] == "ready":
            break
        assert replica["state"] != "quarantined", replica
        time.sleep(0.5)
    events = [event["message"] for event in real_fleet.data("events")["events"]]
    assert any("its workers copied those of" in message for message in events), events
    assert served(real_fleet) == digests
    assert answers(real_fleet) == pushed
    assert real_fleet.data("weights", "verify")["agree"] is True
