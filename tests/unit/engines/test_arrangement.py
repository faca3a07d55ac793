"""How a worker holds the model, in a word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside.digest import arrangement


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
    assert arrangement(configuration(parallel, model)) == expected


def test_servers_with_room_for_adapters_hold_other_tensors() -> None:
    assert arrangement(configuration(lora_config=object())) == "bfloat16-lora"


@pytest.mark.parametrize(
    ("amx", "bf16", "expected"),
    [
        (True, True, "bfloat16-amx"),
        (False, True, "bfloat16-avx512bf16"),
        (False, False, "bfloat16-avx2"),
    ],
)
def test_processors_that_compute_differently_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, amx: bool, bf16: bool, expected: str
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert arrangement(configuration(device="cpu")) == expected


def configuration(
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    *,
    device: str = "cuda",
    lora_config: Any = None,
) -> Any:
    sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{**sizes, "enable_expert_parallel": False, **(parallel or {})}
        ),
        model_config=SimpleNamespace(
            **{"dtype": "torch.bfloat16", "quantization": None, **(model or {})}
        ),
        device_config=SimpleNamespace(device_type=device),
        lora_config=lora_config,
    )
