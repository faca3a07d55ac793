"""A mixture of experts on CPU, where vLLM itself forgets to pack what an update brings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.inside import (
    CORRUPTIBLE,
    DTYPE,
    EVERYWHERE,
    EXPERT,
    ask,
    assert_holds,
    assert_noticed,
)
from tests.integration.unlike import TRANSPORTS, WHOLE, answers, write_fleet
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.real, pytest.mark.beside]


def held(fleet: FleetCli) -> tuple[list[int], str]:
    """What the server answers, and the digest of what it holds."""
    (report,) = fleet.data("weights", "verify")["servers"]
    assert report["digest"]
    return answers(fleet)["whole-0"], report["digest"]


def without_expert(checkpoint: Path, directory: Path) -> Path:
    """A copy without one part of one expert."""
    from safetensors.torch import load_file, save_file

    copy = directory / "short"
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def assert_parts_of_experts_are_missed(fleet: FleetCli, made: dict[str, Path], short: Path) -> None:
    """Also where the checkpoint that the server was started with cannot tell."""
    known, aside = made["a"] / "model.safetensors", made["a"] / "aside"
    refused = fleet.json("sync-weights", str(short), expect=1)["error"]["message"]
    assert "experts.3.up_proj.weight is missing" in refused
    for transport in TRANSPORTS:
        known.rename(aside)
        try:
            push = "sync-weights", "--transport", transport, str(short)
            failed = fleet.json(*push, expect=1)["error"]["message"]
        finally:
            aside.rename(known)
        lacking = "model.layers.0.mlp.experts.routed_experts (no up_proj of expert 3)"
        assert "got no complete weights" in failed and lacking in failed, (transport, failed)
        fleet.run("wait", "--timeout", "150", expect=None)
        fleet.run("sync-weights", str(made["a"]))


def test_a_push_of_experts_leaves_a_server_as_one_started_on_them(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    made = {
        name: make_tiny_checkpoint(tmp_path / name, seed=seed, experts=4)
        for name, seed in (("a", 1), ("b", 2))
    }
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()
    started = {}
    try:
        for name in ("b", "a"):
            write_fleet(fleet, made[name], {**WHOLE, **CORRUPTIBLE})
            fleet.run("up", timeout_s=UP_TIMEOUT_S)
            started[name] = held(fleet)
            if name == "b":
                fleet.run("down")
        assert started["a"][0] != started["b"][0]
        assert started["a"][1] != started["b"][1]
        for transport in TRANSPORTS:
            for name in ("b", "a"):
                fleet.run("sync-weights", "--transport", transport, str(made[name]))
                assert held(fleet) == started[name], (transport, name)
        assert_holds(fleet, "whole-0", made["a"])
        assert_parts_of_experts_are_missed(fleet, made, without_expert(made["b"], tmp_path))
        assert held(fleet) == started["a"]
        # one server: there is no other to compare it with, as where all are damaged alike
        for damage in (*EVERYWHERE, EXPERT):
            assert_noticed(fleet, "whole-0", damage, made["a"])
        assert held(fleet) == started["a"]
        ask(fleet, "whole-0", "skyctl_corrupt", damage=DTYPE)
        assert not fleet.json("weights", "verify", expect=None)["ok"]
        refused = fleet.json("sync-weights", str(made["a"]), expect=1)["error"]
        assert "not what this checkpoint came to when it was pushed before" in refused["message"]
        assert refused["hint"] == "skyctl recover"
    finally:
        fleet.run("down", expect=None)
