"""A fleet file of two real servers on CPU, wherever they run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.fleet_cli import FEW_BLOCKS, FleetCli


def write_two(
    fleet: FleetCli, model: Path, *, env: Mapping[str, str] | None = None, **more: Any
) -> None:
    """Each has a core, as skyctl has it on this machine; by itself vLLM puts both on the first.
    What vLLM knows of models is in this user's home, and a node of a test has another."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {
        "name": "two",
        "model": str(model),
        "replicas": [
            {"env": {"VLLM_CPU_OMP_THREADS_BIND": str(core)}} for core in (cores[0], cores[-1])
        ],
        "device": "cpu",
        "env": {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"), **(env or {})},
        "args": {
            "max-model-len": 2048,
            "enforce-eager": True,
            "max-num-seqs": 16,
            **FEW_BLOCKS,
        },
        "router": {"policy": "round_robin"},
        **more,
    }
    (fleet.directory / "fleet.yaml").write_text(json.dumps(settings))  # JSON is YAML
