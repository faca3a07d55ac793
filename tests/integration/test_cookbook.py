"""Recipes of tinker-cookbook 0.6.1, unmodified and offline, on a real fleet."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.launch.local.host import free_port
from tests.integration.conftest import needs_vllm
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.tinker_sdk import run_script
from tests.tiny import make_tiny_checkpoint

pytestmark = [
    needs_vllm,
    pytest.mark.real,
    pytest.mark.beside,
    pytest.mark.skipif(
        importlib.util.find_spec("tinker_cookbook") is None, reason="needs tinker-cookbook"
    ),
]
MODEL = "Qwen/Qwen3-8B"  # recipes know its context and tokenizer by this name
COMMON = (f"model_name={MODEL}", "renderer_name=role_colon")
REWARD = "env/all/reward/total"
RECIPE_S = 400


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetCli]:
    root = tmp_path_factory.mktemp("cookbook")
    fleet = FleetCli(root / "d", root / "home", {"HF_HUB_OFFLINE": "1"})
    fleet.directory.mkdir()
    make_tiny_checkpoint(fleet.directory / MODEL, seed=1)
    (fleet.directory / "fleet.yaml").write_text(
        f"name: cookbook\nmodel: ./{MODEL}\nserved_model_name: tiny\nreplicas: 1\n"
        "args: {max-model-len: 2048, enforce-eager: true, num-gpu-blocks-override: 512}\n"
        "lora: {max_rank: 32, max_adapters: 2}\n"
        f"tinker: {{base_model: {MODEL}, port: {free_port('127.0.0.1')}}}\n"
    )
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)


def run_recipe(fleet: FleetCli, name: str, log: str, *options: str) -> list[dict[str, Any]]:
    """Run a recipe's command line to its end; the metrics of its steps."""
    exports = fleet.run("urls", "--format", "tinker").stdout
    shown = subprocess.check_output(["sh", "-c", f"{exports}\nenv -0"], text=True)
    environ = dict(line.split("=", 1) for line in shown.split("\0") if line)
    arguments = [*COMMON, f"log_path={log}", "behavior_if_log_dir_exists=delete", *options]
    module = importlib.util.find_spec(f"tinker_cookbook.recipes.{name}")
    assert module is not None and module.origin is not None
    run_script(
        module.origin,
        *arguments,
        cwd=fleet.directory,
        timeout_s=RECIPE_S,
        env={**environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"},
    )
    lines = (fleet.directory / log / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def conversations(path: Path, count: int) -> Path:
    """Sums as conversations, as the arithmetic environment asks for them."""
    lines = []
    for number in range(count):
        x, y = number % 10, number // 10 % 10
        messages = [
            {"role": "user", "content": f"What is {x} + {y}?"},
            {"role": "assistant", "content": str(x + y)},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


def test_recipes_run_to_their_end(fleet: FleetCli) -> None:
    sums = conversations(fleet.directory / "sums.jsonl", 320)
    sizes = (
        "max_length=256",
        "batch_size=32",
        "learning_rate=3e-3",
        "eval_every=0",
        "num_epochs=6",
    )
    losses = [
        step["train_mean_nll"]
        for step in run_recipe(fleet, "chat_sl.train", "sl", f"dataset={sums}", *sizes)
        if "train_mean_nll" in step
    ]
    assert losses[-1] < 0.7 * losses[0], losses
    kept = (fleet.directory / "sl" / "checkpoints.jsonl").read_text().splitlines()
    start = json.loads(kept[-1])["state_path"]

    distilled = run_recipe(
        fleet,
        "prompt_distillation.train",
        "pd",
        f"file_path={sums}",
        "num_epochs=1",
        "max_length=256",
        "batch_size=64",
        "max_steps=2",
        "eval_every=0",
    )
    assert distilled
    for log, count, options in (
        ("rl", 8, ("loss_fn=importance_sampling", "kl_penalty_coef=0")),
        ("ppo", 2, ("loss_fn=ppo", "max_steps_off_policy=1")),
    ):
        steps = run_recipe(
            fleet,
            "math_rl.train",
            log,
            f"load_checkpoint_path={start}",
            "groups_per_batch=8",
            "env=arithmetic",
            *("group_size=8", "max_tokens=16", "learning_rate=1e-3", "eval_every=0"),
            f"max_steps={count}",
            *options,
        )
        rewards = [step[REWARD] for step in steps if REWARD in step]
        assert len(rewards) == count, [list(step) for step in steps]
        if count > 2:  # an answer that does not end costs 0.1
            assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
    rl = ("group_size=4", "max_tokens=8", "max_steps=2", "eval_every=0")
    shorter = run_recipe(fleet, "preference.shorter.train", "shorter", "batch_size=4", *rl)
    guesses = run_recipe(fleet, "multiplayer_rl.guess_number.train", "guess", "batch_size=4", *rl)
    assert shorter and guesses
