"""Fleets on GPUs. Without CUDA devices every test here is skipped, and says so."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from skyctl.fleet.devices import discover_gpus
from tests.gpu.faulty import FaultyFleet

SHAPE = "qwen3-0.5b"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def need_gpus(count: int) -> None:
    found = len(discover_gpus())
    if found < count:
        pytest.skip(f"needs {count} CUDA device{'s' if count > 1 else ''}, {found} found")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Two checkpoints of about 1 GB, "a" and "b"."""
    need_gpus(1)
    directory = tmp_path_factory.mktemp("checkpoints")
    made = {name: directory / name for name in ("a", "b")}
    for seed, path in enumerate(made.values(), 1):
        write_checkpoint(path, SHAPE, seed)
    yield made
    shutil.rmtree(directory)


@pytest.fixture(scope="module", params=["ipc", "nccl"])
def faulty_fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: dict[str, Path],
) -> Iterator[FaultyFleet]:
    """One server on GPU 0; over NCCL the sender has another GPU."""
    need_gpus(1 if request.param == "ipc" else 2)
    fleet = FaultyFleet(tmp_path_factory.mktemp(request.param), request.param, checkpoints)
    try:
        fleet.up()
        yield fleet
    finally:
        fleet.run("down", expect=None, timeout_s=120)
