"""A fleet of stub SGLang servers behind the real router, from `up` to `down`: the steps that real
ones take on a GPU (`tests/gpu/test_sglang.py`). They build on each other."""

from __future__ import annotations

from pathlib import Path

from tests.faults.sglang_fleet import stub_run
from tests.gpu.sglang import STEPS


def test_a_fleet_of_sglang_servers(tmp_path: Path) -> None:
    run = stub_run(tmp_path)
    try:
        for step in STEPS:  # one test: several would be shared out to several processes
            assert step(run), step.__name__
    finally:
        run.down()
