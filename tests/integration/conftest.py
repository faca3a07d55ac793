"""One real fleet for the whole module: two vLLM CPU servers and the vllm-router."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forking
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.tiny import make_tiny_checkpoint

NEEDS = ("vllm", "vllm_router", "torch")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
"""Without importing it, which takes seconds."""

# vLLM's core does a single worker's work by itself then: of three processes, each of which imports
# for most of a server's start, two are left. It does not limit its threads, which on busy cores
# wait for each other for seconds. Where a server has several workers, all is as ever. And vLLM
# compiles its sampler at the first request that draws, for half a minute on a busy machine.
SERVER_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
os.environ |= SERVER_ENVIRONMENT


def _turn(item: pytest.Item) -> int:
    """Pages show the fleet as a reader has it: before other tests kill servers of it. Its end is
    the last that it is needed for; another module would have to start it again."""
    if item.path.name.startswith("test_docs"):
        return 0
    if item.name == "test_down_leaves_nothing":
        return 2
    return 3 if item.path.stem == "test_unlike_servers" else 1  # these have their own


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Real servers are forked from a process that has imported vLLM. What starts them elsewhere
    (sshd, Ray) executes them as ever."""
    forking.use(servers=forking.VLLM if item.get_closest_marker("real") else "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[place] for place in here), key=_turn)
    for place, item in zip(here, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of one model, which answer differently."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_tiny_checkpoint(root / name, seed=seed) for name, seed in (("a", 1), ("b", 2))
    }


@pytest.fixture(scope="session")
def real_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetCli]:
    """`skyctl init --tiny` and `skyctl up`, shared by the session; taken down at its end."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the cpu extra ({', '.join(missing)} not installed)")
    root: Path = tmp_path_factory.mktemp("real")
    fleet = FleetCli(root / "tiny", root / "home")
    fleet.directory.mkdir()
    try:
        fleet.run("init", "--tiny", ".", "--name", "tiny")
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)
