"""The example that sends with vLLM's own trainer engine asks for it as the installed vLLM takes it.

The transfer itself needs GPUs: tests/gpu/test_own_sender.py.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples/own_sender.py"


def test_the_installed_engine_takes_what_the_example_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    engine = engines.NCCLTrainerWeightTransferEngine
    example = runpy.run_path(str(EXAMPLE))
    given: dict[str, Any] = {}

    def connect(init_info: Any, *, client: Any, source: Any) -> SimpleNamespace:
        given.update(init_info=init_info, source=source)
        return SimpleNamespace(send_weights=lambda: None)

    monkeypatch.setattr(engine, "trainer_init", connect)
    update = SimpleNamespace(
        servers=[], headers={}, master_address="127.0.0.1", master_port=7, world_size=3
    )
    weights = example["Weights"]({})
    monkeypatch.setattr(example["Servers"], "_post", lambda *_: None)
    example["send"](update, weights)
    assert isinstance(given["init_info"], engine.init_info_cls) and given["init_info"].is_sender
    assert given["init_info"].world_size == 3 and given["source"] is weights
