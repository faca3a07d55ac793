"""The steps of `sglang.py` on a GPU, one test each. They build on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.conftest import need_gpus
from tests.gpu.sglang import ON_GPUS, SGLangRun, second_gpu


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangRun]:
    need_gpus(1, "sglang")
    run = SGLangRun(tmp_path_factory.mktemp("sglang"), sender_gpu=second_gpu())
    yield run
    run.down()


@pytest.mark.parametrize("step", ON_GPUS, ids=lambda step: step.__name__)
def test_a_fleet_of_sglang_servers(step: Callable[[SGLangRun], str], run: SGLangRun) -> None:
    print(step(run))
