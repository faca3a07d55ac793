"""How a checkpoint fits this worker's model: what its config.json would make of the model, and
which of its tensors vLLM's loader takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.engines.vllm.inside.experts import tied_layers
from skyctl.engines.vllm.inside.placement import Trace, tracing
from skyctl.wire.messages import RowQuestion, TensorUse


def configurations(
    model_config: Any, config: Mapping[str, Any], *, started_at: float
) -> dict[str, Any]:
    """`running`: the configuration that this server computes by; `pushed`: `config` (a config.json)
    as this server would have read it, with defaults filled in and its `--hf-overrides` applied;
    None if the model's configuration class does not take it. `started_at`: when vLLM had read its
    own, in seconds since the epoch.
    """
    running, pushed = model_config.hf_config, None
    with suppress(Exception):  # whatever a configuration class makes of a file
        pushed = _plain(_built(model_config, config))
        if (started := _read_at_start(model_config, started_at)) is not None:
            running = _built(model_config, started)
    return {"running": _plain(running), "pushed": pushed}


def _read_at_start(model_config: Any, started_at: float) -> dict[str, Any] | None:
    """The config.json that this server was started with; None if it may have changed since.

    vLLM changes some values of its own configuration object, which are no differences between two
    checkpoints: this is compared in its place where it can be.
    """
    file = Path(model_config.hf_config_path or model_config.model) / "config.json"
    with suppress(OSError, ValueError):
        if _unchanged_since(file, started_at):
            config: dict[str, Any] = json.loads(file.read_text())
            return config
    return None


def _unchanged_since(file: Path, moment: float) -> bool:
    """Whether neither a file, nor its directory, nor a link that leads there has changed."""
    places = [file, file.parent, *(place for place in file.parents if place.is_symlink())]
    return all(max(p.lstat().st_ctime, p.stat().st_ctime) < moment for p in places)


def _built(model_config: Any, config: Mapping[str, Any]) -> Any:
    """The configuration object that vLLM makes of a config.json (`get_config` and
    `ModelConfig.__post_init__` of vLLM 0.32).
    """
    kind = type(model_config.hf_config)
    built = kind.from_dict(json.loads(json.dumps(dict(config))))
    overrides = model_config.hf_overrides
    if callable(overrides):
        built = overrides(built)
    else:
        flat = {key: value for key, value in overrides.items() if not isinstance(value, dict)}
        built.update(flat)
    _patch_rope(built)
    if not callable(overrides):
        nested = {key: value for key, value in overrides.items() if isinstance(value, dict)}
        if nested:
            model_config._apply_dict_overrides(built, nested)
    return built


def _patch_rope(built: Any) -> None:
    """Give rope parameters one spelling, wherever they are."""
    try:
        from vllm.transformers_utils.config import patch_rope_parameters
    except ImportError:
        return
    patch_rope_parameters(built)
    patch_rope_parameters(built.get_text_config())
    for name in getattr(built, "sub_configs", None) or ():
        patch_rope_parameters(getattr(built, name))


def _plain(config: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return plain


def uses(model: Any, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> list[TensorUse]:
    """What vLLM's loader does with each tensor (name, torch dtype, shape)."""
    questions = [RowQuestion(name, dtype, list(shape), [], 0, 1) for name, dtype, shape in tensors]
    with tracing(model) as tracer:
        return [_use(trace) for trace in tracer.trace(questions)] if questions else []


def _use(trace: Trace) -> TensorUse:
    if trace.loads:
        return TensorUse.LOADED
    return TensorUse.REFUSED if trace.refusal else TensorUse.IGNORED


def ties_output(model: Any) -> bool:
    """Whether the output layer computes with the embeddings' weight. In an open update it has a
    weight of its own, and only the configuration says so.
    """
    tied = any(name.rpartition(".")[2] == "lm_head" for name, _ in tied_layers(model))
    return tied or bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
