"""Two prefill and two decode servers over NIXL, a GPU each, and pushes while clients ask."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.gpu.conftest import need_gpus
from tests.gpu.devices import available
from tests.integration.fleet_cli import UP_TIMEOUT_S, greedy_body
from tests.integration.pairs import MODEL, PROMPT, TOKENS, Pair, on_gpus, started_on_gpus
from tests.load import Load

pytest.importorskip("nixl")
pytestmark = pytest.mark.gpu
CLIENTS = 32


def test_two_pairs_take_pushes_under_load(tmp_path: Path) -> None:
    need_gpus(4)
    checkpoints, answer = started_on_gpus(tmp_path / "started")
    # every prompt is computed and transferred anew
    args = {"enable-prefix-caching": False, "num-gpu-blocks-override": 2000}
    pairs = on_gpus(tmp_path / "pairs", checkpoints, answer, available()[:4], args)
    try:
        pairs.run("up", timeout_s=UP_TIMEOUT_S)
        texts = asyncio.run(_pushes_under_load(pairs))
        assert pairs.greedy() == answer["a"]
        assert pairs.transferred() > 1000
    finally:
        pairs.run("down", expect=None)
        shutil.rmtree(tmp_path / "started")
    # each was computed with the weights of one checkpoint, from its prompt to its last token
    assert set(texts) == {texts[0], texts[-1]} and len(set(texts)) == 2


async def _pushes_under_load(pairs: Pair) -> list[str]:
    """The answers of all clients; the first by "a", the last by "b"."""
    body = greedy_body(MODEL, PROMPT, TOKENS)
    load = Load(pairs.data("urls")["router"], "", body)
    await load.become(CLIENTS)
    await asyncio.sleep(2)
    first = load.answers[0]
    for name in ("b", "a", "b"):
        await asyncio.to_thread(
            pairs.run, "sync-weights", str(pairs.checkpoints[name]), "--mode", "wait"
        )
        await asyncio.sleep(2)
        assert await asyncio.to_thread(pairs.greedy) == pairs.answer[name]
    last = load.answers[-1]
    await load.become(0)
    await asyncio.to_thread(pairs.run, "sync-weights", str(pairs.checkpoints["a"]))
    print(f"{len(load.answers)} answers, {len(load.failures)} failures")
    assert not load.failures, load.failures[:3]
    return [first, *load.answers, last]
