"""Two config.json of one model: the keys in which they may differ, and spellings of one value.

transformers fills in what a file leaves out, and renames what older versions wrote. Where it is
installed, it decides (here, or in a server: `engines/vllm/inside/fit.py`); elsewhere this module
knows the spellings and defaults of common models, and everything else counts as a difference.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ALL_KEYS = "*"
"""In place of a key, for all."""
_HARMLESS_BY_REASON = {
    "where it was saved, and by what": "_name_or_path name_or_path transformers_version auto_map "
    "_commit_hash unsloth_version unsloth_fixed model_name",
    "servers choose element types, kernels and caches themselves": "dtype torch_dtype use_cache "
    "attn_implementation _attn_implementation _attn_implementation_autoset use_bfloat16 "
    "torchscript return_dict output_attentions output_hidden_states output_scores",
    "for training alone": "initializer_range initializer_factor router_aux_loss_coef "
    "router_z_loss_coef router_jitter_noise output_router_logits aux_loss_alpha seq_aux "
    "pretraining_tp gradient_checkpointing chunk_size_feed_forward",
    "only servers that draft tokens with it load such a head": "num_nextn_predict_layers "
    "mtp_num_hidden_layers",
    "the tensors themselves are compared": "tie_word_embeddings",
    "labels, and how requests become tokens (`fit.py`)": "id2label label2id problem_type "
    "finetuning_task task_specific_params tokenizer_class prefix bos_token_id eos_token_id "
    "pad_token_id sep_token_id decoder_start_token_id",
    "how transformers generates by default": "max_length min_length do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences return_dict_in_generate remove_invalid_values "
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens",
}
_HARMLESS = frozenset(" ".join(_HARMLESS_BY_REASON.values()).split())
_HARMLESS_SUFFIXES = ("dropout", "_pdrop", "dropout_prob", "dropout_rate")

_SPELLINGS = {
    "hidden_activation": "hidden_act",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_fraction": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
_SAME_VALUES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_USUAL = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
"""What most models' configuration classes take for a key that is left out."""
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """A key in which two configurations differ."""

    key: str
    """Dotted, where it is in a section."""
    ours: Any
    """Its value in the checkpoint; None where it has none."""
    theirs: Any
    """Its value in what the servers run."""

    def __str__(self) -> str:
        if self.key == "quantization_config" and None in (self.ours, self.theirs):
            return f"one of them is quantized: {self._values}"
        return self._values

    @property
    def _values(self) -> str:
        return f"{self.key} is {_shown(self.ours)} here, the servers run {_shown(self.theirs)}"

    @property
    def root(self) -> str:
        """The key of the file that it is in."""
        return self.key.partition(".")[0]

    def is_allowed(self, keys: Collection[str]) -> bool:
        """Whether `keys` name it, a section that it is in, or everything (`ALL_KEYS`)."""
        return ALL_KEYS in keys or any(f"{self.key}.".startswith(f"{key}.") for key in keys)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def compare_configs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """Differences of two config.json that change what a model computes, by key."""
    plain = differences(*_aligned(ours, theirs))
    if plain:
        with suppress(Exception):  # whatever a configuration class makes of a file
            return differences(_by_transformers(ours), _by_transformers(theirs))
    return plain


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """The same, of configurations that are spelled alike. What one lacks counts as a value that
    turns something off.
    """
    every = sorted(_differences(ours, theirs, ""), key=lambda difference: difference.key)
    both = (ours, theirs)
    return [each for each in every if not _is_idle(each.key.rpartition(".")[2], both)]


def _differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], section: str
) -> Iterator[Difference]:
    for key in ours.keys() | theirs.keys():
        if is_harmless(key):
            continue
        pair = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if isinstance(pair[0], Mapping) and isinstance(pair[1], Mapping):
            yield from _differences(pair[0], pair[1], f"{section}{key}.")
        elif not _is_same(key, *pair):
            values = (None if value is _ABSENT else value for value in pair)
            yield Difference(section + key, *values)


def is_harmless(key: str) -> bool:
    """Whether a key changes nothing that the servers compute from a checkpoint's tensors."""
    return key in _HARMLESS or key.endswith(_HARMLESS_SUFFIXES)


def _is_same(key: str, ours: Any, theirs: Any) -> bool:
    if key == "architectures" and (_ABSENT in (ours, theirs) or not ours or not theirs):
        return True
    if key == "architectures":
        return _names(ours) == _names(theirs)
    for value, other in ((ours, theirs), (theirs, ours)):
        if value is _ABSENT:
            return not other or other == _USUAL.get(key) or (_is_factor(key) and other == 1)
    return bool(ours == theirs or _same_value(ours) == _same_value(theirs))


def _names(architectures: Any) -> set[str]:
    names = architectures if isinstance(architectures, list) else [architectures]
    return {str(name).removeprefix("FSDP") for name in names}


def _is_factor(key: str) -> bool:
    return key.endswith(("multiplier", "factor", "scale", "scaling"))


def _same_value(value: Any) -> Any:
    return _SAME_VALUES.get(value, value) if isinstance(value, str) else value


def _is_idle(key: str, configs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a key decides nothing in either configuration, because of the others' values."""
    if key in ("max_position_embeddings", "original_max_position_embeddings"):
        # other ropes are computed from it
        return all(set(_values(config, "rope_type", "type")) <= {"default"} for config in configs)
    if key == "max_window_layers":
        return all(not any(_values(config, "sliding_window")) for config in configs)
    return False


def _values(config: Mapping[str, Any], *keys: str) -> Iterator[Any]:
    """Values of these keys in all sections."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, *keys)
        elif key in keys:
            yield value


def _aligned(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both in the usual spelling. If only one nests its language model, it is flattened."""
    both = [dict(ours), dict(theirs)]
    nested = [isinstance(config.get("text_config"), Mapping) for config in both]
    if nested[0] != nested[1]:
        both = [{**(c.pop("text_config", None) or {}), **c} for c in both]
    return usual_spelling(both[0]), usual_spelling(both[1])


def usual_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with one spelling for what transformers 4 and 5 write differently, and the
    values that follow from others filled in.
    """
    plain = {
        key: usual_spelling(value)
        if key.endswith("_config") and isinstance(value, Mapping)
        else value
        for key, value in config.items()
        if value is not None
    }
    for spelling, key in _SPELLINGS.items():
        if spelling in plain:
            plain.setdefault(key, plain.pop(spelling))
    heads, size = plain.get("num_attention_heads"), plain.get("hidden_size")
    if isinstance(heads, int) and isinstance(size, int) and heads > 0:
        plain.setdefault("num_key_value_heads", heads)
        plain.setdefault("head_dim", size // heads)
    if plain.pop("use_sliding_window", True) is False:
        plain.pop("sliding_window", None)
    if set(plain.get("layer_types") or ()) <= {"full_attention"}:
        plain.pop("layer_types", None)
    rope = _rope(plain)
    return {**plain, **({"rope_parameters": rope} if rope else {})}


def _rope(plain: dict[str, Any]) -> dict[str, Any]:
    """Take rope parameters out of a configuration, as transformers 5 writes them."""
    written = plain.pop("rope_scaling", None), plain.pop("rope_parameters", None)
    rope: dict[str, Any] = {}
    for part in written:
        rope |= part if isinstance(part, Mapping) else {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return rope  # one for each type of layer
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := plain.pop(key, None)) is not None:
            rope.setdefault(key, value)
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", 10000.0)
    return rope


def _by_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as transformers reads it. Raises ImportError or whatever it makes of it."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers")
    from transformers import CONFIG_MAPPING

    built = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    plain: dict[str, Any] = json.loads(json.dumps(built.to_dict(), default=str))
    return {**plain, "model_type": config["model_type"]}
