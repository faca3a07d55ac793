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


def test_only_elements_that_differ_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = pytest.importorskip("vllm.distributed.weight_transfer.sparse_nccl_engine")
    torch = pytest.importorskip("torch")
    engine = engines.SparseNCCLTrainerWeightTransferEngine
    example = runpy.run_path(str(EXAMPLE))
    old = {f"layer.{n}": torch.zeros(4, 3, dtype=torch.bfloat16) for n in range(40)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in list(new.values())[1:]:
        tensor[2, 1], tensor[3, 0] = 1.5, -0.0
    sent: list[Any] = []
    monkeypatch.setattr(example["Servers"], "_post", lambda _, route, *rest: sent.append(route))
    monkeypatch.setattr(engine, "_broadcast_chunk", lambda _, patches: sent.append(patches))
    given: dict[str, Any] = {}

    def connect(init_info: Any, *, client: Any) -> Any:
        given["init_info"] = init_info
        connected = engine(client=client)
        connected.model_update_group = "formed"
        return connected

    monkeypatch.setattr(engine, "trainer_init", connect)
    update = SimpleNamespace(
        servers=[], headers={}, master_address="127.0.0.1", master_port=7, world_size=3
    )
    example["send_changes"](update, example["changes"](old, new))
    assert isinstance(given["init_info"], engine.init_info_cls) and given["init_info"].is_sender
    patches = [patch for part in sent if isinstance(part, list) for patch in part]
    assert [part for part in sent if isinstance(part, str)] == [
        *("start_weight_update", "finish_weight_update", "shutdown_weight_transfer_engine")
    ]
    for patch in patches:
        old[patch.name].view(-1)[patch.indices] = patch.values
    assert len(patches) == 39 and {patch.indices.numel() for patch in patches} == {2}
    bits = [torch.stack(list(one.values())).view(torch.int16) for one in (old, new)]
    assert torch.equal(*bits)
