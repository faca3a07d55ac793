"""What a worker drafts with, loaded again."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("vllm")

LM_HEAD = "vllm.model_executor.layers.quantization.online.lm_head"


def model_of(**layers: Any) -> Any:
    """A model with a loader like those of vLLM's."""
    import torch
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    class Model(torch.nn.Module):
        def load_weights(self, tensors: Any) -> None:
            parameters = dict(self.named_parameters())
            for name, tensor in tensors:
                load = getattr(parameters[name], "weight_loader", default_weight_loader)
                load(parameters[name], tensor)

    model = Model()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model.requires_grad_(False)


@pytest.mark.parametrize("whole", [True, False])
def test_a_quantized_copy_of_the_output_layer_is_made_again(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.33 does with `draft_lm_head_quantization` when a trainer updates a draft model."""
    import torch
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from skyctl.engines.vllm.inside.draft import load_draft

    head, copied = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    target, draft = model_of(lm_head=head), model_of(body=torch.nn.Linear(2, 2), lm_head=head)
    record_metadata_for_reloading(draft)
    draft.lm_head = copied.requires_grad_(False)

    def share(model: Any) -> None:
        model.lm_head = head

    def restore(model: Any, refresh: bool = True) -> None:
        model.lm_head = copied
        if refresh:
            copied.weight.copy_(head.weight)

    heads = SimpleNamespace(share_source_lm_heads=share, restore_quantized_lm_heads=restore)
    monkeypatch.setitem(sys.modules, LM_HEAD, heads)  # type: ignore[arg-type]
    online = import_module(LM_HEAD.rpartition(".")[0])
    monkeypatch.setattr(online, "lm_head", heads, raising=False)
    tensors = {"body.weight": torch.ones(2, 2), "body.bias": torch.ones(2)}
    if not whole:
        del tensors["body.bias"]
    loader = SimpleNamespace(get_all_weights=lambda config, model: list(tensors.items()))
    monkeypatch.setattr("vllm.model_executor.model_loader.get_model_loader", lambda config: loader)
    monkeypatch.setattr("vllm.config.set_current_vllm_config", nullcontext)
    settings = SimpleNamespace(draft_model_config=SimpleNamespace(model="", revision=None))
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft),
        vllm_config=SimpleNamespace(speculative_config=settings),
    )
    head.weight.fill_(3.0)  # a push has brought it
    with nullcontext() if whole else pytest.raises(RuntimeError, match="of the draft model"):
        load_draft(worker, "draft")
    assert draft.lm_head is copied and head.weight.tolist() == [[3.0] * 2] * 2
    assert copied.weight.tolist() == head.weight.tolist()
    assert draft.body.weight.tolist() == [[1.0] * 2] * 2
