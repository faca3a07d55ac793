"""What a real server comes to: by its launch, by pushes, and behind skyctl's back."""

from __future__ import annotations

import struct
from pathlib import Path

import httpx
import pytest

from skyctl.checkpoints.header import read_header
from skyctl.store.paths import fleet_paths
from skyctl.store.state import FleetState
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.unlike import WHOLE, write_fleet
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.real, pytest.mark.beside]


def spoil(checkpoint: Path) -> str:
    """Put NaN into the last tensor of a checkpoint; its name."""
    file = checkpoint / "model.safetensors"
    _, tensors = read_header(file)
    last = max(tensors, key=lambda tensor: tensor.begin)
    with file.open("r+b") as opened:
        opened.seek(last.begin)
        opened.write(struct.pack("<f", float("nan")) if last.dtype == "F32" else b"\xc0\xff")
    return last.name


def test_a_fleet_knows_what_its_server_must_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    made = {n: make_tiny_checkpoint(tmp_path / n, seed=i) for i, n in enumerate(("a", "b", "nan"))}
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()
    try:
        write_fleet(fleet, made["a"], WHOLE)
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        for name, transport in (("a", "shm"), ("b", "disk"), ("a", "gloo"), ("b", "shm")):
            result = fleet.data("sync-weights", str(made[name]), "--transport", transport)["job"]
            compared = result["result"]["compared"]
            assert compared["tensors"] > 10, (name, transport)
        monkeypatch.setenv("SKYCTL_HOME", str(fleet.home))
        with FleetState(fleet_paths("unlike").database) as state:
            known = state.expected.everything()
        # the launch, the bytes and the files of both: each content came to one digest
        assert {one.origin for one in known.digests} == {"launch", "push"}
        assert len({one.digest for one in known.digests}) == 2 and known.broken == ()
        [row] = fleet.data("weights", "verify")["servers"]
        assert row["as_recorded"] is True and row["compared"]["tensors"] > 10

        name = spoil(made["nan"])
        refused = fleet.run("sync-weights", str(made["nan"]), expect=1)
        assert f"{name} holds NaN or infinity" in refused.stderr
        assert fleet.data("status")["health"] == "healthy"

        url = fleet.data("urls")["servers"]["whole-0"]
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(made["a"])}}
        headers = {"Authorization": f"Bearer {fleet.control_token}"}
        httpx.post(f"{url}/collective_rpc", json=reload, headers=headers, timeout=60)
        unlike = fleet.run("weights", "verify", expect=3)
        assert "does not hold what was sent" in unlike.stderr
        fleet.run("sync-weights", str(made["b"]))
        fleet.run("weights", "verify")
    finally:
        fleet.run("down", expect=None)
