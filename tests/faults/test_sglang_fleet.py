"""A fleet of stub SGLang servers behind the real router, from `up` to `down`: the steps that real
ones take on a GPU (`tests/gpu/test_sglang.py`). They build on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.sglang_fleet import stub_run
from tests.gpu.sglang import STEPS, SGLangRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangRun]:
    run = stub_run(tmp_path_factory.mktemp("sglang"))
    yield run
    run.down()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_fleet_of_sglang_servers(step: Callable[[SGLangRun], str], run: SGLangRun) -> None:
    assert step(run)
