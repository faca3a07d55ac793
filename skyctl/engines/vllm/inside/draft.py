"""The weights that a worker drafts tokens with (speculative decoding): loaded again from a
checkpoint, as vLLM loads them when it starts.

An EAGLE or MTP head may compute with layers of the model itself. Those get nothing here that they
do not have already: the model is digested before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def draft_model(worker: Any) -> Any:
    """The model that a worker drafts with. Raises RuntimeError: it has none, or this vLLM does not
    show it (before 0.32).
    """
    get = getattr(worker.model_runner, "get_draft_model", None)
    model = get() if callable(get) else None
    if model is None:
        raise RuntimeError("this vLLM has no draft model whose weights could be loaded again")
    return model


def load_draft(worker: Any, path: str) -> None:
    """Load the draft model of a worker from a checkpoint's directory.

    Raises:
        RuntimeError: layers got no weights, or layers of the model itself got other ones.
    """
    from vllm.config import set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from skyctl.engines.vllm.inside.completeness import (
        missing_parameters,
        require_complete,
        watch_biases,
    )
    from skyctl.engines.vllm.inside.digest import digest_model
    from skyctl.engines.vllm.inside.experts import repack_tied_layers, tied_layers
    from skyctl.engines.vllm.inside.placement import partial_loads

    model, target = draft_model(worker), worker.model_runner.get_model()
    before = digest_model(target)["digest"]
    config = copy.copy(worker.vllm_config.speculative_config.draft_model_config)
    config.model, config.revision = path, None
    if getattr(config, "model_weights", ""):
        config.model_weights = ""
    tensors = get_model_loader(LoadConfig()).get_all_weights(config, model)
    with set_current_vllm_config(worker.vllm_config), partial_loads(), _heads_of_target(model):
        of_target = {id(layer) for layer in target.modules()}
        shared = {name for name, layer in model.named_modules() if id(layer) in of_target}
        shared |= {name for name, _ in tied_layers(model)}
        initialize_layerwise_reload(model)
        watch_biases(model)
        try:
            model.load_weights(tensors)
            missing = missing_parameters(model, shared)
        finally:
            finalize_layerwise_reload(model, config)
    repack_tied_layers(model)
    require_complete(missing, "the draft model")
    if digest_model(target)["digest"] != before:
        raise RuntimeError(
            "the draft model shares layers with the model, and its checkpoint has other weights "
            "for them"
        )


@contextmanager
def _heads_of_target(model: Any) -> Iterator[None]:
    """Within it the draft model computes with the model's output layer, where it has a quantized
    copy of that (`draft_lm_head_quantization`, since vLLM 0.33), which is made again afterwards.
    """
    try:
        from vllm.model_executor.layers.quantization.online import lm_head
    except ImportError:
        yield
        return
    lm_head.share_source_lm_heads(model)
    loaded = False
    try:
        yield
        loaded = True
    finally:
        lm_head.restore_quantized_lm_heads(model, refresh=loaded)
