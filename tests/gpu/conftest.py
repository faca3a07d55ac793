"""Fleets on GPUs. Without CUDA devices every test here is skipped, and says so."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.checkpoints import write_checkpoint
from tests.gpu.devices import available
from tests.gpu.faulty import FaultyFleet
from tests.gpu.quantized import quantize
from tests.gpu.special import CASES, QUANTIZED, Case, SpecialFleet

SHAPE = "qwen3-0.5b"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def need_gpus(count: int, engine: str = "vllm") -> None:
    found = len(available())
    if found < count:
        pytest.skip(f"needs {count} CUDA device{'s' if count > 1 else ''}, {found} found")
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")


def make_checkpoints(directory: Path, shape: str) -> dict[str, Path]:
    """Two checkpoints of about 1 GB, "a" and "b"; quantized if the shape's name says so."""
    made = {name: directory / shape / name for name in ("a", "b")}
    ending = next((ending for ending in QUANTIZED if shape.endswith(ending)), "")
    plain = shape.removesuffix(ending)
    for seed, path in enumerate(made.values(), 1):
        if not ending:
            write_checkpoint(path, shape, seed)
            continue
        source = directory / f"plain-{seed}"
        write_checkpoint(source, plain, seed)
        quantize(source, path, QUANTIZED[ending])
        shutil.rmtree(source)
    return made


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    need_gpus(1)
    directory = tmp_path_factory.mktemp("checkpoints")
    yield make_checkpoints(directory, SHAPE)
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


@pytest.fixture(scope="session")
def special_fleets(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[SpecialFleet]]]:
    """All fleets that this run asks for and has the GPUs for; they start at the same time."""
    callspecs = (getattr(item, "callspec", None) for item in request.session.items)
    params = (spec.params.get("case") for spec in callspecs if spec)
    wanted = {case.name for case in params if isinstance(case, Case)}
    found = len(available())
    cases = [case for case in CASES if case.name in wanted and case.gpus <= found]
    root = tmp_path_factory.mktemp("special")
    made = {shape: make_checkpoints(root, shape) for shape in {case.shape for case in cases}}

    fleets = {case.name: SpecialFleet(root / case.name, case, made[case.shape]) for case in cases}

    def start(fleet: SpecialFleet) -> SpecialFleet:
        fleet.up()
        return fleet

    def stop(fleet: SpecialFleet) -> None:
        fleet.run("down", expect=None, timeout_s=120)

    with ThreadPoolExecutor(len(CASES)) as pool:
        try:
            yield {name: pool.submit(start, fleet) for name, fleet in fleets.items()}
        finally:
            list(pool.map(stop, fleets.values()))
    shutil.rmtree(root)


@pytest.fixture
def special_fleet(request: pytest.FixtureRequest, case: Case) -> SpecialFleet:
    need_gpus(case.gpus)
    fleets: dict[str, Future[SpecialFleet]] = request.getfixturevalue("special_fleets")
    return fleets[case.name].result()
