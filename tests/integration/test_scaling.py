"""Replicas by load on real servers: a step of the load, a push, and the load once more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import needs_vllm
from tests.integration.endpoints import PROMPT, TOKENS, answers
from tests.integration.fleet_cli import FEW_BLOCKS, UP_TIMEOUT_S, FleetCli, greedy_body
from tests.integration.reference import answered
from tests.load import Load

pytestmark = [pytest.mark.real, needs_vllm]
WAIT_S = 180


@pytest.fixture
def fleet(tmp_path: Path, checkpoints: dict[str, Path]) -> Iterator[FleetCli]:
    fleet = FleetCli(tmp_path, tmp_path / "home")
    settings = {
        "name": "sized",
        "model": str(checkpoints["a"]),
        "device": "cpu",
        "scale": {"max": 2, "value": 3, "up_after_s": 3, "down_after_s": 6, "sleep_s": 120},
        "env": {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm")},
        "args": {
            "max-model-len": 2048,
            "enforce-eager": True,
            "max-num-seqs": 16,
            **FEW_BLOCKS,
        },
        "router": {"policy": "round_robin"},
    }
    (tmp_path / "fleet.yaml").write_text(json.dumps(settings))  # JSON is YAML
    try:
        yield fleet
    finally:
        fleet.run("down", "--drain-timeout", "0", expect=None)


async def until(fleet: FleetCli, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while not holds(status := await asyncio.to_thread(fleet.data, "status")):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return status


def served(status: dict[str, Any]) -> int:
    return sum(row["state"] == "ready" and bool(row["routed"]) for row in status["replicas"])


async def test_a_server_that_load_adds_or_wakes_answers_with_the_pushed_weights(
    fleet: FleetCli, checkpoints: dict[str, Path]
) -> None:
    run = fleet.run
    await asyncio.to_thread(run, "up", timeout_s=UP_TIMEOUT_S)
    await asyncio.to_thread(run, "sync-weights", str(checkpoints["b"]), "--weight-version", "b")
    urls = fleet.data("urls")
    load = Load(urls["router"], fleet.key, greedy_body(urls["model"], PROMPT, 400))
    await load.become(2)
    await load.become(8)
    status = await until(fleet, lambda status: served(status) == 2)
    assert [row["weight_version"] for row in status["replicas"]] == ["b", "b"]
    expected = answered(checkpoints["b"], PROMPT, TOKENS)
    assert await asyncio.to_thread(answers, fleet) == [expected, expected]
    await load.become(1)
    status = await until(fleet, lambda status: status["scaling"]["asleep"] == ["sized-1"])
    assert served(status) == 1 and len(status["replicas"]) == 1
    # what sleeps misses this push
    await asyncio.to_thread(run, "sync-weights", str(checkpoints["a"]), "--weight-version", "a")
    await load.become(8)
    status = await until(fleet, lambda status: served(status) == 2)
    assert [row["weight_version"] for row in status["replicas"]] == ["a", "a"]
    expected = answered(checkpoints["a"], PROMPT, TOKENS)
    assert await asyncio.to_thread(answers, fleet) == [expected, expected]
    await load.become(0)
    assert load.failures == [] and load.answers
    events = [event["message"] for event in fleet.data("events")["events"]]
    assert "is woken" in events and events.count("starting") == 3  # two servers and the router
