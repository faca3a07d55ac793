"""How a worker holds the model, in a word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside.arrangement import arrangement


@pytest.mark.parametrize(
    ("parallel", "model", "expected"),
    [
        ({}, {}, "bfloat16"),
        ({"tensor_parallel_size": 2}, {}, "tp2-bfloat16"),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 4}, {}, "pp2-dp4-bfloat16"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, {}, "tp2-ep-bfloat16"),
        ({}, {"dtype": "torch.float32", "quantization": "fp8"}, "float32-fp8"),
    ],
)
def test_what_divides_servers(
    parallel: dict[str, Any], model: dict[str, Any], expected: str
) -> None:
    sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, "enable_expert_parallel": False, **parallel}),
        model_config=SimpleNamespace(**{"dtype": "torch.bfloat16", "quantization": None, **model}),
    )
    assert arrangement(config) == expected
