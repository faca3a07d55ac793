"""Servers that hold a model differently take one push: whole and split over ranks, tied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyctl.fleet.tiny import make_tiny_checkpoint
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, greedy

pytestmark = pytest.mark.real

WHOLE, SPLIT = {"name": "whole"}, {"name": "split", "tensor_parallel_size": 2}


def write_fleet(fleet: FleetCli, model: Path, *groups: dict[str, object]) -> None:
    settings = {
        "name": "unlike",
        "model": str(model),
        "served_model_name": "unlike",
        "replicas": groups,
        "device": "cpu",
        "args": {"max-model-len": 256, "enforce-eager": True},
        "router": {"enabled": False},
    }
    # JSON is YAML
    (fleet.directory / "fleet.yaml").write_text(json.dumps(settings))


def answers(fleet: FleetCli) -> dict[str, list[int]]:
    urls: dict[str, str] = fleet.data("urls")["servers"]
    key = fleet.key
    return {name: greedy(url, "unlike", "the kettle", key=key) for name, url in urls.items()}


def test_a_push_brings_what_a_server_started_on_it_answers(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    made = {
        name: make_tiny_checkpoint(tmp_path / name, seed=seed, tie_word_embeddings=True)
        for name, seed in (("a", 1), ("b", 2))
    }
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()
    try:
        write_fleet(fleet, made["b"], WHOLE)
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        of_b = answers(fleet)["whole-0"]
        fleet.run("down")
        write_fleet(fleet, made["a"], WHOLE, SPLIT)
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        of_a = answers(fleet)
        assert of_b not in of_a.values()
        # not only back to "a": a layer that a reload leaves out would go unnoticed
        for transport in ("shm", "gloo", "disk"):
            push = ("sync-weights", "--transport", transport)
            fleet.run(*push, str(made["b"]))
            assert answers(fleet) == {"whole-0": of_b, "split-0": of_b}, transport
            fleet.run(*push, str(made["a"]))
            assert answers(fleet) == of_a, transport
        digests = {row["weights_digest"] for row in fleet.data("weights")["servers"]}
        assert len(digests) == 2
        assert any(":tp2-" in digest for digest in digests)
        assert fleet.data("weights", "verify")["agree"] is True
    finally:
        fleet.run("down", expect=None)
