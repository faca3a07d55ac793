"""What a PEFT directory has beside plain LoRA, which vLLM refuses or, worse, leaves out unnoticed.

Keys are those of PEFT's `LoraConfig` (up to 0.19). One that is not known here may change what the
adapter computes: it is refused unless it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyctl.errors import PreflightError

_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "LoRA bias",
    "modules_to_save": "modules saved whole (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "target_parameters": "LoRA of whole parameters, such as fused experts (target_parameters)",
    "layer_replication": "layer replication",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow, which routes between adapters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
}
_NO_CHANGE = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        *("peft_version", "inference_mode", "megatron_config", "megatron_core", "runtime_config"),
        # which modules it has: the tensors say so
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # how it was trained; a weight that is tied in training is refused if it was saved
        *("lora_dropout", "fan_in_fan_out", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
    }
)
_READ = frozenset(
    ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias")
)
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that leave the base as it is (vLLM 0.32, `lora/peft_helper.py`)."""
_MERGE = "merge it into its base (model.merge_and_unload()) and push that: skyctl sync-weights DIR"
_TENSORS = {
    "lora_magnitude_vector": ("DoRA's magnitudes", _MERGE),
    "trainable_tokens_": ("trained tokens", _MERGE),
    ".lora_A.default": (
        "an adapter's name in its tensors' names",
        "save it by model.save_pretrained(DIR), or name tensors as get_peft_model_state_dict does",
    ),
    ".lora_B.default": (
        "an adapter's name in its tensors' names",
        "save it by model.save_pretrained(DIR), or name tensors as get_peft_model_state_dict does",
    ),
    "embed_tokens.": (
        "embeddings saved whole",
        f"save it with save_embedding_layers=False; if they were trained, {_MERGE}",
    ),
    "lm_head.": (
        "an output layer saved whole",
        f"save it with save_embedding_layers=False; if it was trained, {_MERGE}",
    ),
}
"""Parts of the names of tensors outside LoRA, what they are, and what to do about them."""


def refuse_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise PreflightError for what an adapter's configuration sets and vLLM does not serve."""
    used = list(_unserved(config))
    if used:
        raise PreflightError(
            f"{directory} uses {' and '.join(used)}, which vLLM does not serve", hint=_MERGE
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise PreflightError(
            f"{directory} starts from a base that init_lora_weights={start!r} has changed, which "
            "the servers do not run",
            hint="convert it to plain LoRA: save_pretrained(DIR, "
            "path_initial_model_for_weight_conversion=…)",
        )
    readable = _UNSUPPORTED.keys() | _NO_CHANGE | _READ
    if unknown := sorted(key for key, value in config.items() if value and key not in readable):
        raise PreflightError(
            f"{directory} sets {unknown[0]}, which may change what it computes, and which neither "
            "skyctl nor vLLM supports",
            hint=f"take {unknown[0]} out of adapter_config.json if it changes nothing",
        )


def _unserved(config: Mapping[str, Any]) -> Iterator[str]:
    yield from (words for key, words in _UNSUPPORTED.items() if config.get(key))
    if config.get("bias", "none") != "none":
        yield "trained biases"


def not_lora(directory: Path, name: str) -> PreflightError:
    """The error of a tensor that does not belong to a LoRA module."""
    for part, (words, hint) in _TENSORS.items():
        if part in name:
            return PreflightError(
                f"{directory} has {words} ({name}), which vLLM does not serve", hint=hint
            )
    return PreflightError(f"{directory}: {name} does not belong to a LoRA module")


def same_name(name: str, other: str) -> bool:
    """Whether two names, of directories or on the hub, can mean the same model: copies with weights
    of fewer bits (QLoRA) are named after it.
    """
    return _bare(name) == _bare(other)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _bare(name: str) -> str:
    bare = _last(name)
    for suffix in ("-4bit", "-8bit", "-bnb", "-unsloth"):
        bare = bare.removesuffix(suffix)
    return bare
