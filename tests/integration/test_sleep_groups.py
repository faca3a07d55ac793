"""Two models on real servers, one awake at a time: each answers as it did before it slept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import needs_vllm
from tests.integration.endpoints import PROMPT, TOKENS
from tests.integration.fleet_cli import (
    FEW_BLOCKS,
    UP_TIMEOUT_S,
    FleetCli,
    bearer,
    greedy,
    greedy_body,
)
from tests.integration.reference import answered
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.real, needs_vllm]


@pytest.fixture
def fleets(tmp_path: Path, checkpoints: dict[str, Path]) -> Iterator[FleetCli]:
    """policy.yaml and judge.yaml, of models that answer differently."""
    cli = FleetCli(tmp_path, tmp_path / "home")
    judge = make_tiny_checkpoint(tmp_path / "judge", seed=3)
    for name, model in (("policy", checkpoints["a"]), ("judge", judge)):
        settings = {
            "name": name,
            "model": str(model),
            "device": "cpu",
            "sleep_group": "pair",
            "env": {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm")},
            "args": {
                "max-model-len": 2048,
                "enforce-eager": True,
                "max-num-seqs": 16,
                **FEW_BLOCKS,
            },
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(settings))  # JSON is YAML
    try:
        yield cli
    finally:
        for name in ("policy", "judge"):
            cli.run("down", "-f", f"{name}.yaml", "--drain-timeout", "0", expect=None)


def _ask(cli: FleetCli, name: str) -> list[int]:
    urls, key = cli.data("urls", "--fleet", name), _key(cli, name)
    return greedy(urls["router"], urls["model"], PROMPT, TOKENS, key=key)


def _key(cli: FleetCli, name: str) -> str:
    return cli.run("urls", "--fleet", name, "--show-key").stdout.strip()


def test_each_model_answers_as_before_it_slept(
    fleets: FleetCli, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    run = fleets.run
    run("up", "-f", "policy.yaml", timeout_s=UP_TIMEOUT_S)
    run("sync-weights", str(checkpoints["b"]), "--fleet", "policy", "--weight-version", "b")
    policy, judge = (answered(c, PROMPT, TOKENS) for c in (checkpoints["b"], tmp_path / "judge"))
    assert _ask(fleets, "policy") == policy != judge
    run("up", "-f", "judge.yaml", timeout_s=UP_TIMEOUT_S)
    assert _ask(fleets, "judge") == judge
    for awake, asleep, expected in (("policy", "judge", policy), ("judge", "policy", judge)):
        run("switch", awake)
        assert _ask(fleets, awake) == expected
        urls = fleets.data("urls", "--fleet", asleep)
        refused = httpx.post(
            f"{urls['router']}/v1/completions",
            json=greedy_body(urls["model"], PROMPT, TOKENS),
            headers=bearer(_key(fleets, asleep)),
            timeout=60,
        )
        assert refused.status_code == 503
        health = {fleet["name"]: fleet["state"] for fleet in fleets.data("ls")["fleets"]}
        assert health == {awake: "healthy", asleep: "asleep"}
