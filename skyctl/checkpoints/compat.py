"""Whether a checkpoint fits the model the servers run: compared by headers and config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint, locate, read_checkpoint, read_config
from skyctl.checkpoints.header import Tensor
from skyctl.errors import PreflightError, SkyctlError

SHAPING_KEYS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "tie_word_embeddings",
    "quantization_config",
)
"""Keys of config.json that decide which tensors a model has and their shapes."""

COMPUTING_KEYS = ("hidden_act", "rms_norm_eps", "layer_norm_epsilon", "sliding_window")
"""Keys that change what the same tensors compute; a running server keeps its own values."""

_SHOWN = 3
_TIED = "lm_head.weight"


def check_compatible(checkpoint: Checkpoint, model_path: str | None) -> list[str]:
    """Compare a checkpoint with the one the servers run; returns notes for the operator.

    Args:
        checkpoint: what is to be pushed.
        model_path: directory or hub id of what the servers run, None when unknown.

    Raises:
        PreflightError: names, shapes or configuration differ; `details["problems"]` lists all.
    """
    directory = locate(model_path) if model_path else None
    if model_path is None or directory is None:
        what = model_path or "what the servers run"
        return [f"{what} is not on this machine: names and shapes were not compared with it"]
    try:
        config = read_config(directory)
    except PreflightError:
        return [f"{directory} has no config.json: names and shapes were not compared with it"]
    problems = compare_configs(checkpoint.config, config)
    notes: list[str] = []
    # a model loaded with dummy weights has a configuration and no tensors
    if any(directory.glob("*.safetensors")):
        base = read_base(model_path)
        tied = bool(config.get("tie_word_embeddings"))
        if checkpoint.headers != base.headers:
            problems += compare_tensors(checkpoint.tensors, base.tensors, tied=tied)
            notes += compare_dtypes(checkpoint.tensors, base.tensors)
    else:
        notes.append(f"{directory} holds no tensors: only its config.json was compared")
    if problems:
        raise PreflightError(
            f"{checkpoint.path} does not fit the running model: {in_short(problems)}",
            hint="push a checkpoint of the same architecture, or start a fleet on this one",
            details={"problems": problems},
        )
    return notes


def reference(launched: str, pushed: str | None) -> str:
    """The checkpoint that shows what the servers run: the one they were launched with, if it is
    local. The one pushed last may have been overwritten since, and a directory always fits itself.
    """
    return launched if pushed is None or locate(launched) is not None else pushed


def read_base(model_path: str) -> Checkpoint:
    """The checkpoint the servers run.

    Raises:
        PreflightError: it cannot be read; the message says that it is not the one to push.
    """
    try:
        return read_checkpoint(model_path)
    except SkyctlError as error:
        raise PreflightError(f"the checkpoint the servers run: {error.message}") from error


def in_short(problems: list[str]) -> str:
    """The first few problems, and how many more there are."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def compare_configs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Differences of two config.json, one line each. Keys that one lacks do not count."""
    problems = []
    for key in SHAPING_KEYS + COMPUTING_KEYS:
        here, there = _config_value(ours, key), _config_value(theirs, key)
        if key == "quantization_config":
            if (here is None) != (there is None):
                problems.append(
                    "one of them is quantized: quantization_config is "
                    f"{_shown(here)} here, the servers run {_shown(there)}"
                )
            continue
        if here is not None and there is not None and here != there:
            problems.append(f"{key} is {_shown(here)} here, the servers run {_shown(there)}")
    here, there = _rope_theta(ours), _rope_theta(theirs)
    if here is not None and there is not None and here != there:
        problems.append(f"rope_theta is {here:g} here, the servers run {there:g}")
    return problems


def _config_value(config: Mapping[str, Any], key: str) -> Any:
    """A value of a config, also looked up in its text part (multi-modal models nest it)."""
    value = config.get(key)
    nested = config.get("text_config")
    return nested.get(key) if value is None and isinstance(nested, dict) else value


def _rope_theta(config: Mapping[str, Any]) -> float | None:
    """`rope_theta`, wherever older or newer versions of transformers write it."""
    value = _config_value(config, "rope_theta")
    if value is None:
        parameters = _config_value(config, "rope_parameters")
        value = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def compare_tensors(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], *, tied: bool = False
) -> list[str]:
    """Differences of two sets of tensors, one line each. With `tied` embeddings either may leave
    the output layer out.
    """
    here = {tensor.name: tensor for tensor in ours}
    there = {tensor.name: tensor for tensor in theirs}
    optional = {name for name in here.keys() | there.keys() if tied and name.endswith(_TIED)}
    problems = []
    for name in here.keys() & there.keys():
        ours_shape, theirs_shape = list(here[name].shape), list(there[name].shape)
        if ours_shape != theirs_shape:
            problems.append(f"{name} is {ours_shape} here, the servers run {theirs_shape}")
    for name in there.keys() - here.keys() - optional:
        problems.append(f"{name} is missing, the servers run {list(there[name].shape)}")
    for name in here.keys() - there.keys() - optional:
        problems.append(f"{name} {list(here[name].shape)} is not in the model the servers run")
    return sorted(problems)


def compare_dtypes(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> list[str]:
    """A note if element types differ: servers cast what they are sent without a warning."""
    there = {tensor.name: tensor.dtype for tensor in theirs}
    changed = [t for t in ours if there.get(t.name, t.dtype) != t.dtype]
    if not changed:
        return []
    first = changed[0]
    return [
        f"{len(changed)} tensors differ in dtype ({first.name} is {first.dtype} here, "
        f"{there[first.name]} in the servers' checkpoint): the servers cast them"
    ]
