"""A prefill and a decode server over NIXL, behind the real router: on CPU, and on two GPUs where
there are two (`-m gpu`)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.devices import available
from tests.integration.conftest import needs_vllm
from tests.integration.fleet_cli import UP_TIMEOUT_S, greedy_body
from tests.integration.pairs import (
    DECODE,
    HELD,
    LEASE_S,
    MODEL,
    PREFILL,
    Answers,
    Pair,
    asked,
    on_cpu,
    on_gpus,
    started_on_gpus,
)

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed"),
]
KINDS = [
    pytest.param("cpu", marks=pytest.mark.real),
    pytest.param("gpus", marks=pytest.mark.gpu),
    pytest.param("gpus without sleep", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def of_gpus(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[dict[str, Path], Answers]]:
    root = tmp_path_factory.mktemp("started")
    yield started_on_gpus(root)
    shutil.rmtree(root)


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("pd")
    if request.param == "cpu":
        found = on_cpu(root, request.getfixturevalue("checkpoints"))
    else:
        checkpoints, answer = request.getfixturevalue("of_gpus")
        args = {} if request.param == "gpus" else {"enable-sleep-mode": False}
        found = on_gpus(root, checkpoints, answer, available()[:2], args)
    try:
        found.run("up", timeout_s=UP_TIMEOUT_S)
        yield found
    finally:
        found.run("down", expect=None)


def test_a_pair_answers_as_one_server(pair: Pair) -> None:
    assert pair.greedy() == pair.answer["a"]
    assert pair.transferred() > 100
    status = pair.data("status")
    assert [row["role"] for row in status["replicas"]] == ["prefill", "decode"]


def test_a_pause_and_a_push_outlast_a_cache_that_nobody_fetches(pair: Pair) -> None:
    pair.hold()
    pair.run("pause", "--mode", "keep")
    pair.run("resume")
    pair.hold()
    for name in ("b", "a", "b"):
        pair.run("sync-weights", str(pair.checkpoints[name]))
        before = pair.transferred()
        assert pair.greedy() == pair.answer[name]
        assert pair.transferred() > before  # nothing of other weights was cached
    refused = pair.json(
        "sync-weights", str(pair.checkpoints["a"]), "--rolling", "1", "--mode", "wait", expect=1
    )["error"]
    assert "computed with other weights" in refused["message"]
    assert pair.greedy() == pair.answer["b"]


def test_a_cache_is_not_fetched_past_its_lease(pair: Pair) -> None:
    """Its blocks are another request's by then, and tokens would be wrong."""
    prefill, decode = (pair.servers[name] for name in (PREFILL, DECODE))
    body = {**greedy_body(MODEL, HELD, 8), "kv_transfer_params": pair.hold()}
    pair.run("pause", DECODE, "--mode", "keep")
    with ThreadPoolExecutor() as pool:
        late = pool.submit(asked, decode, body)
        time.sleep(LEASE_S + 2)
        for start in range(300, 350, 10):
            other = " ".join(map(str, range(start, start + 80)))
            asked(prefill, greedy_body(MODEL, other, 1))
        pair.run("resume")
        tokens = late.result()["choices"][0]["token_ids"]
    alone = asked(prefill, greedy_body(MODEL, HELD, 8))
    assert tokens == alone["choices"][0]["token_ids"]
    pair.run("wait", "--timeout", "60")


def test_servers_that_die_come_back_to_the_pair(pair: Pair) -> None:
    pair.kill(PREFILL)
    pair.kill(DECODE)
    pair.run("wait", "--timeout", "300", timeout_s=UP_TIMEOUT_S)
    assert pair.greedy() == pair.answer["b"]
    assert pair.transferred() > 0


def test_the_router_may_die_while_servers_sleep(pair: Pair) -> None:
    if not pair.sleeps:
        pytest.skip("its servers cannot sleep")
    pair.run("sleep")
    pair.kill("router")
    pair.run("wake")
    pair.run("wait", "--timeout", "60")
    assert pair.greedy() == pair.answer["b"]
