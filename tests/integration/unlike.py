"""A fleet of real servers that differ in how they shard, without a router."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.fleet_cli import FEW_BLOCKS, FleetCli, greedy

WHOLE, SPLIT = {"name": "whole"}, {"name": "split", "tensor_parallel_size": 2}
TRANSPORTS = ("shm", "gloo", "disk")
PROMPT, TOKENS = "the kettle", 24


def write_fleet(fleet: FleetCli, model: Path, *groups: dict[str, object]) -> None:
    settings = {
        "name": "unlike",
        "model": str(model),
        "served_model_name": "unlike",
        "replicas": groups,
        "device": "cpu",
        "args": {"max-model-len": 256, "enforce-eager": True, **FEW_BLOCKS},
        "router": {"enabled": False},
    }
    # JSON is YAML
    (fleet.directory / "fleet.yaml").write_text(json.dumps(settings))


def answers(fleet: FleetCli) -> dict[str, list[int]]:
    urls: dict[str, str] = fleet.data("urls")["servers"]
    key = fleet.key
    return {name: greedy(url, "unlike", PROMPT, TOKENS, key=key) for name, url in urls.items()}
