"""The Python API and the toy RL loop on real vLLM servers and the real router."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from skyctl import Fleet
from skyctl.errors import PreflightError
from tests.integration.fleet_cli import FleetCli, bearer
from tests.pages import metrics

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
RL_TOY = ROOT / "examples" / "rl_toy.py"
STEPS = 5


@pytest.fixture
def fleet(real_fleet: FleetCli, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setenv("SKYCTL_HOME", str(real_fleet.home))
    return Fleet.load(real_fleet.directory / "fleet.yaml")


def test_the_toy_loop_raises_its_reward_and_the_servers_have_its_weights(
    real_fleet: FleetCli, tmp_path: Path
) -> None:
    real_fleet.run("sync-weights", "checkpoints/a")
    command = [str(RL_TOY), "--steps", str(STEPS), "--learning-rate", "0.01"]
    printed = real_fleet.run_example(*command, "--plot", "reward.svg", cwd=tmp_path, timeout_s=400)
    history = json.loads((tmp_path / "rl_toy.json").read_text())
    steps = history["steps"]
    assert len(steps) == STEPS
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.05, printed
    # what the servers sampled with is what the trainer has, after every push
    assert all(step["logprob_gap"] < 1e-3 for step in steps)
    assert all(0 < step["freeze_window_s"] < step["push_s"] for step in steps)
    status = real_fleet.data("status")
    assert status["weight_version"] == steps[-1]["weight_version"] == f"rl-toy-{STEPS}"
    assert real_fleet.data("weights", "verify")["agree"] is True
    drawn = ElementTree.parse(tmp_path / "reward.svg").getroot()
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}circle")) == STEPS


async def test_weights_from_memory_change_answers_and_change_them_back(
    real_fleet: FleetCli, fleet: Fleet
) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    files = {
        name: real_fleet.directory / "checkpoints" / name / "model.safetensors" for name in "ab"
    }

    async def answers() -> list[list[int]]:
        results = await asyncio.gather(
            *(
                fleet.generate("The fleet", max_tokens=12, temperature=0, server=server)
                for server in (await fleet.urls()).servers
            )
        )
        assert len({tuple(result.token_ids) for result in results}) == 1, "servers disagree"
        return [result.token_ids for result in results]

    async with fleet:
        await fleet.sync_weights(real_fleet.directory / "checkpoints" / "a")
        before = await answers()
        by_path = await fleet.sync_weights(real_fleet.directory / "checkpoints" / "b")
        other = await answers()
        assert before != other
        await fleet.sync_weights(load_file(files["a"]), weight_version="a-again")
        assert await answers() == before
        result = await fleet.sync_weights(iter(load_file(files["b"]).items()))
        assert await answers() == other
        assert result.content_digest == by_path.content_digest
        halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(files["a"]).items()}
        with pytest.raises(PreflightError, match="bfloat16 here, float32"):
            await fleet.sync_weights(halves)
        assert not (await fleet.sync_weights(halves, dtype="match")).notes
        assert (await fleet.verify_weights()).agree is True


async def test_requests_outlive_a_push_and_tokens_go_both_ways(
    real_fleet: FleetCli, fleet: Fleet
) -> None:
    async with fleet:
        running = asyncio.create_task(
            fleet.generate(["The fleet", "Every server"], max_tokens=200, ignore_eos=True)
        )
        await fleet.sync_weights(real_fleet.directory / "checkpoints" / "a")
        assert [len(result.token_ids) for result in await running] == [200, 200]
        tokens = await fleet.tokenize("The fleet came up")
        assert await fleet.detokenize(tokens) == "The fleet came up"
        completion = await fleet.completion(tokens, max_tokens=4, temperature=0, ignore_eos=True)
        one = await fleet.generate(
            [tokens], max_tokens=4, temperature=0, ignore_eos=True, logprobs=0
        )
        assert completion["choices"][0]["text"] == one[0].text
        assert one[0].prompt_token_ids == tokens
        assert one[0].logprobs is not None and all(value <= 0 for value in one[0].logprobs)
        chat = await fleet.chat([{"role": "user", "content": "hi"}], max_tokens=4)
        assert chat["choices"][0]["message"]["content"]


def test_the_dashboards_metrics_are_on_the_real_pages(real_fleet: FleetCli, tmp_path: Path) -> None:
    real_fleet.run("generate", "The fleet", "--max-tokens", "4")
    real_fleet.run("urls", "--prometheus-sd", str(tmp_path / "targets.json"))
    groups: list[dict[str, Any]] = json.loads((tmp_path / "targets.json").read_text())
    assert [group["labels"]["role"] for group in groups] == ["server", "server", "router"]
    pages = {
        group["labels"]["role"]: httpx.get(
            f"http://{group['targets'][0]}/metrics", headers=bearer(real_fleet.key), timeout=60
        ).text
        for group in groups
    }
    for role, prefix in (("server", "vllm:"), ("router", "vllm_router_")):
        # one TYPE line per metric, whose counters may or may not be written with _total
        shown = set(re.findall(rf"^# TYPE ({prefix}\w+)", pages[role], re.MULTILINE))
        shown |= {f"{name}_total" for name in shown}
        # counted only once something goes wrong
        asked = {n for n in metrics(prefix) if not n.endswith(("errors_total", "retries_total"))}
        assert asked <= shown, asked - shown
