"""Models and heads that servers draft with, pushed with the model on a GPU: a server ends as one
that was started on both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_checkpoint
from tests.gpu.conftest import need_gpus
from tests.gpu.devices import available
from tests.integration.drafting import accepted, row, write_head
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli

SHAPE, MODEL = "qwen3-4-layers", "drafts"
METHODS = ("draft_model", "eagle3")


class DraftFleet(FleetCli):
    """A server that was started on one of `models`, and drafts with what belongs to it."""

    def __init__(self, root: Path, method: str, start: str, models: dict[str, Path]) -> None:
        super().__init__(root / "fleet", root / "home")
        self.models = models
        self.drafts = {
            name: path if method == "draft_model" else path.with_name(f"{name}-head")
            for name, path in models.items()
        }
        transport = "nccl" if method == "draft_model" and len(available()) > 1 else "ipc"
        speculative = {
            "method": method,
            "model": str(self.drafts[start]),
            "num_speculative_tokens": 3,
        }
        settings: dict[str, Any] = {
            "name": MODEL,
            "model": str(models[start]),
            "served_model_name": MODEL,
            "replicas": 1,
            "gpus": available()[:1],
            "share_gpus": transport == "ipc",
            "args": {
                "max-model-len": 1024,
                "enforce-eager": True,
                "gpu-memory-utilization": 0.08,
                "kv-cache-memory-bytes": 1 << 30,  # others start on the same GPU meanwhile
                "speculative-config": speculative,
            },
            "weight_transfer": {"transport": transport},
            "router": {"enabled": False},
        }
        self.directory.mkdir(parents=True)
        (self.directory / "fleet.yaml").write_text(json.dumps(settings))

    def up(self) -> None:
        self.run("up", timeout_s=UP_TIMEOUT_S)

    def push(self, model: str, draft: str) -> dict[str, Any]:
        command = ("sync-weights", str(self.models[model]), "--draft", str(self.drafts[draft]))
        result: dict[str, Any] = self.data(*command)["job"]["result"]
        return result


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], DraftFleet]]:
    """By method and the model that each was started on; all start at the same time."""
    need_gpus(1)
    root = tmp_path_factory.mktemp("drafts")
    models = {name: root / name for name in ("a", "b")}
    for seed, (name, path) in enumerate(models.items(), 1):
        write_checkpoint(path, SHAPE, seed)
        write_head(path, root / f"{name}-head", seed, "bfloat16")
    started = {
        (method, name): DraftFleet(root / f"{method}-{name}", method, name, models)
        for method in METHODS
        for name in models
    }
    with ThreadPoolExecutor(len(started)) as pool:
        try:
            list(pool.map(DraftFleet.up, started.values()))
            yield started
        finally:
            list(pool.map(lambda f: f.run("down", expect=None, timeout_s=120), started.values()))
    shutil.rmtree(root)


@pytest.mark.parametrize("method", METHODS)
def test_a_b_a_of_both_leaves_a_server_as_one_started_on_them(
    method: str, fleets: dict[tuple[str, str], DraftFleet]
) -> None:
    fleet, right = fleets[method, "a"], fleets[method, "b"]
    on = {"a": accepted(fleet, MODEL), "b": accepted(right, MODEL)}
    assert on["a"][0] != on["b"][0]
    refused = fleet.json("sync-weights", str(fleet.models["b"]), expect=1)["error"]
    assert f"speculative decoding by {method}" in refused["message"]
    for name in ("b", "a", "b"):
        result = fleet.push(name, name)
        tokens, share = accepted(fleet, MODEL)
        print(
            f"{method}: {name}: accepted {share:.2f}, as started {on[name][1]:.2f}; "
            f"frozen {1000 * result['freeze_window_s']:.0f} ms by {result['transport']}"
        )
        assert tokens == on[name][0]
        assert abs(share - on[name][1]) < 0.1
    if method == "draft_model":
        assert share > 0.5
        fleet.push("b", "a")
        tokens, share = accepted(fleet, MODEL)
        assert tokens == on["b"][0]
        assert share < 0.5
    assert row(fleet)["state"] == "ready"
