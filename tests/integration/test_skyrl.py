"""SkyRL's own inference client, untouched, on a fleet made as `urls --format skyrl` says."""

from __future__ import annotations

import asyncio
import importlib.util
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typing_extensions

from skyctl.core.urls import SKYRL_ARGS
from tests.integration.conftest import NEEDS
from tests.integration.endpoints import PROMPTS
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.unit.core.urls import overrides

pytestmark = [pytest.mark.real, pytest.mark.beside]

_FLEET = """
name: skyrl
model: ./checkpoints/a
device: cpu
auth: none
replicas: 2
args: {{max-model-len: 2048, enforce-eager: true, max-num-seqs: 16,
  num-gpu-blocks-override: 512{more}}}
router: {{policy: round_robin}}
weight_transfer: {{chunk_size: 1MiB}}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetCli]:
    if any(importlib.util.find_spec(name) is None for name in (*NEEDS, "skyrl", "aiohttp")):
        pytest.skip("needs the cpu extra and SkyRL")
    root: Path = tmp_path_factory.mktemp("skyrl")
    fleet = FleetCli(root / "skyrl", root / "home")
    fleet.directory.mkdir()
    fleet.run("init", "--tiny", ".", "--name", "skyrl")
    asked_for = "".join(f", {name}: true" for name in SKYRL_ARGS)
    (fleet.directory / "fleet.yaml").write_text(_FLEET.format(more=asked_for))
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)


def client(fleet: FleetCli, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As SkyRL's setup.py makes it from its configuration."""
    # its modules are written for Python 3.12; on 3.11 Pydantic wants this one
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from transformers import AutoTokenizer

    printed = fleet.run("urls", "--format", "skyrl")
    assert "enable-scale-out" not in printed.stderr  # nothing is amiss
    found = {key.rpartition(".")[2]: value for key, value in overrides(printed.stdout).items()}
    return RemoteInferenceClient(
        proxy_url=found["external_proxy_url"],
        server_urls=found["external_server_urls"],
        model_name=found["served_model_name"],
        data_parallel_size=1,
        tokenizer=AutoTokenizer.from_pretrained(fleet.directory / "checkpoints" / "a"),
    )


async def test_rollouts_freeze_push_and_thaw(
    fleet: FleetCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(fleet, monkeypatch) as skyrl:

        async def rollouts(tokens: int) -> Any:
            params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
            return await skyrl.generate(
                {"prompt_token_ids": PROMPTS, "sampling_params": params, "session_ids": [*"abcd"]}
            )

        before = await rollouts(16)
        assert [len(ids) for ids in before["response_ids"]] == [16] * len(PROMPTS)
        assert all(len(found) == 16 for found in before["response_logprobs"])
        assert all(before["responses"])

        paused = await skyrl.pause("keep")
        assert [answer["status"] for answer in paused.values()] == [200, 200]
        frozen = asyncio.create_task(rollouts(16))
        await asyncio.sleep(1.0)
        assert not frozen.done()
        states = {row["state"] for row in fleet.data("status")["replicas"]}
        assert states == {"paused"}
        await skyrl.resume()
        assert (await frozen)["response_ids"] == before["response_ids"]

        await asyncio.to_thread(fleet.run, "sync-weights", "checkpoints/b")
        after = await rollouts(16)
        assert after["response_ids"] != before["response_ids"]
        await skyrl.reset_prefix_cache()
        assert (await rollouts(16))["response_ids"] == after["response_ids"]
