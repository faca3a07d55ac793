"""A prefill and a decode server over NIXL, on CPU, behind the real router."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, greedy_body
from tests.integration.reference import answered

pytest.importorskip("vllm")
pytest.importorskip("nixl")
pytestmark = [pytest.mark.real, pytest.mark.beside]

PROMPT = " ".join(map(str, range(120)))
HELD = " ".join(map(str, range(200, 280)))  # another: a cached prefix is not transferred
LEASE_S = 6
TOKENS = 8
PREFILL, DECODE = "pd-prefill-0", "pd-decode-0"
SETTINGS = """
auth: control
replicas: [{role: prefill}, {role: decode}]
served_model_name: tiny
args: {max-model-len: 512, enforce-eager: true}
env: {VLLM_CPU_NUM_OF_RESERVED_CPU: "1"}
"""


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def greedy(fleet: FleetCli) -> list[int]:
    """The tokens that the fleet's users get."""
    found = fleet.data("generate", PROMPT, "--max-tokens", str(TOKENS), "--temperature", "0")
    return list(found["results"][0]["token_ids"])


def transferred(fleet: FleetCli) -> float:
    """Prompt tokens that the decode server did not compute."""
    with urllib.request.urlopen(f"{servers(fleet)[DECODE]}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    name = "vllm:prompt_tokens_by_source_total"
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(name) and 'source="external_kv_transfer"' in line
    )


def servers(fleet: FleetCli) -> dict[str, str]:
    return dict(fleet.data("urls")["servers"])


def hold(fleet: FleetCli) -> dict[str, Any]:
    """Have the prefill server keep a KV cache that nobody fetches; what a decode server is told."""
    kept = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"model": "tiny", "prompt": HELD, "max_tokens": 1, "kv_transfer_params": kept}
    told: dict[str, Any] = asked(servers(fleet)[PREFILL], body)["kv_transfer_params"]
    assert told["remote_block_ids"]
    return told


def kill(fleet: FleetCli, name: str) -> None:
    status = fleet.data("status")
    found = [row["pid"] for row in status["replicas"] if row["name"] == name]
    os.kill(found[0] if found else status["router"]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while fleet.data("status")["health"] == "healthy" and time.monotonic() < deadline:
        time.sleep(0.2)


@pytest.fixture(scope="module")
def answer(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    """What each checkpoint answers where nothing was pushed or transferred."""
    return {name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module")
def fleet(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetCli]:
    root = tmp_path_factory.mktemp("pd")
    found = FleetCli(root / "d", root / "home")
    found.directory.mkdir()
    (found.directory / "fleet.yaml").write_text(f"name: pd\nmodel: {checkpoints['a']}\n{SETTINGS}")
    try:
        found.run("up", timeout_s=UP_TIMEOUT_S)
        yield found
    finally:
        found.run("down", expect=None)


def test_a_pair_answers_as_one_server(fleet: FleetCli, answer: dict[str, list[int]]) -> None:
    assert greedy(fleet) == answer["a"]
    assert transferred(fleet) > 100
    status = fleet.data("status")
    assert [row["role"] for row in status["replicas"]] == ["prefill", "decode"]


def test_a_pause_and_a_push_outlast_a_cache_that_nobody_fetches(
    fleet: FleetCli, checkpoints: dict[str, Path], answer: dict[str, list[int]]
) -> None:
    hold(fleet)
    fleet.run("pause", "--mode", "keep")
    fleet.run("resume")
    hold(fleet)
    for name in ("b", "a", "b"):
        fleet.run("sync-weights", str(checkpoints[name]))
        before = transferred(fleet)
        assert greedy(fleet) == answer[name]
        assert transferred(fleet) > before  # nothing of other weights was cached
    refused = fleet.json(
        "sync-weights", str(checkpoints["a"]), "--rolling", "1", "--mode", "wait", expect=1
    )["error"]
    assert "computed with other weights" in refused["message"]
    assert greedy(fleet) == answer["b"]


def test_a_cache_is_not_fetched_past_its_lease(fleet: FleetCli) -> None:
    """Its blocks are another request's by then, and tokens would be wrong."""
    prefill, decode = (servers(fleet)[name] for name in (PREFILL, DECODE))
    body = {**greedy_body("tiny", HELD, 8), "kv_transfer_params": hold(fleet)}
    fleet.run("pause", "--server", DECODE, "--mode", "keep")
    with ThreadPoolExecutor() as pool:
        late = pool.submit(asked, decode, body)
        time.sleep(LEASE_S + 2)
        for start in range(300, 350, 10):
            other = " ".join(map(str, range(start, start + 80)))
            asked(prefill, greedy_body("tiny", other, 1))
        fleet.run("resume")
        tokens = late.result()["choices"][0]["token_ids"]
    alone = asked(prefill, greedy_body("tiny", HELD, 8))
    assert tokens == alone["choices"][0]["token_ids"]
    fleet.run("wait", "--timeout", "60")


def test_servers_that_die_come_back_to_the_pair(
    fleet: FleetCli, answer: dict[str, list[int]]
) -> None:
    kill(fleet, PREFILL)
    kill(fleet, DECODE)
    fleet.run("wait", "--timeout", "300", timeout_s=UP_TIMEOUT_S)
    assert greedy(fleet) == answer["b"]
    assert transferred(fleet) > 0


def test_the_router_may_die_while_servers_sleep(
    fleet: FleetCli, answer: dict[str, list[int]]
) -> None:
    fleet.run("sleep")
    kill(fleet, "router")
    fleet.run("wake")
    fleet.run("wait", "--timeout", "60")
    assert greedy(fleet) == answer["b"]
