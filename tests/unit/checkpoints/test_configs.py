"""Which differences of two config.json change what a model computes."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.checkpoints import configs
from skyctl.checkpoints.configs import compare_configs, differences

QWEN = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(params=["alone", "transformers"])
def judge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who normalises: this package alone, or the installed transformers."""
    name: str = request.param
    if name == "alone":
        monkeypatch.setattr(configs.importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("transformers")
    return name


def lines(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [str(difference) for difference in compare_configs(ours, theirs)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        # as transformers 4 and 5 write the same
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500000}},
        ),
        ({}, {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}),
        ({}, {"layer_types": ["full_attention", "full_attention"], "attention_bias": False}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"torch_dtype": "float32"}, {"dtype": "bfloat16", "use_cache": False}),
        ({"transformers_version": "4.51.0", "_name_or_path": "x"}, {"initializer_range": 0.02}),
        ({"attention_dropout": 0.1, "eos_token_id": 7}, {"attention_dropout": 0.0}),
        ({"architectures": ["FSDPQwen3ForCausalLM"]}, {}),
        ({"max_position_embeddings": 4096}, {"max_position_embeddings": 32768}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        ({"num_nextn_predict_layers": 1, "pad_token_id": 3}, {}),
    ],
)
def test_ordinary_saves_of_one_model_do_not_differ(
    ours: dict[str, Any], theirs: dict[str, Any], judge: str
) -> None:
    assert lines({**QWEN, **ours}, {**QWEN, **theirs}) == []
    assert lines({**QWEN, **theirs}, {**QWEN, **ours}) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "key"),
    [
        ({"rope_theta": 1e6}, {}, "rope_parameters.rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}, "rope_parameters.rope_type"),
        ({"rms_norm_eps": 1e-5}, {}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
        ({"sliding_window": 1024, "use_sliding_window": True}, {}, "sliding_window"),
        ({"attention_bias": True}, {}, "attention_bias"),
        ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, {"attn_logit_softcapping": 30.0}, "attn_logit_"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
        ({"routed_scaling_factor": 2.5}, {}, "routed_scaling_factor"),
        ({"scoring_func": "sigmoid"}, {"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": True}, {}, "norm_topk_prob"),
        ({"residual_multiplier": 0.22}, {}, "residual_multiplier"),
        ({"output_multiplier": 0.5}, {"output_multiplier": 1.0}, "output_multiplier"),
        ({"query_pre_attn_scalar": 144}, {}, "query_pre_attn_scalar"),
        ({"num_attention_heads": 8}, {}, "num_attention_heads"),
        ({"something_new": 3}, {"something_new": 4}, "something_new"),
        ({"model_type": "qwen2"}, {}, "model_type"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, {}, "architectures"),
        ({"quantization_config": {"bits": 4}}, {"quantization_config": {"bits": 8}}, "bits"),
        (
            {
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
                "max_position_embeddings": 4096,
            },
            {
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
                "max_position_embeddings": 8192,
            },
            "max_position_embeddings",
        ),
    ],
)
def test_what_changes_the_computation_is_named_with_both_values(
    ours: dict[str, Any], theirs: dict[str, Any], key: str, judge: str
) -> None:
    for pair in ((ours, theirs), (theirs, ours)):
        found = lines(*({**QWEN, **one} for one in pair))
        assert any(key in line for line in found), found


def test_what_was_left_out_follows_from_the_rest() -> None:
    spelled = {
        "layer_norm_epsilon": 1e-6,
        "activation_function": "swish",
        "n_head": 4,
        "n_embd": 128,
        "head_dim": 32,
        "num_key_value_heads": 4,
    }
    plain = {key: value for key, value in QWEN.items() if key != "model_type"}
    for key in ("rms_norm_eps", "hidden_act", "num_attention_heads", "hidden_size"):
        del plain[key]
    assert lines({**plain, **spelled}, {k: v for k, v in QWEN.items() if k != "model_type"}) == []


def test_a_nested_language_model_is_looked_into() -> None:
    ours, theirs = {"text_config": {"hidden_size": 8}}, {"text_config": {"hidden_size": 16}}
    assert lines(ours, theirs) == ["text_config.hidden_size is 8 here, the servers run 16"]
    assert lines({"hidden_size": 8}, theirs) == ["hidden_size is 8 here, the servers run 16"]
    assert lines({"text_config": {"use_cache": True}}, {"text_config": {}}) == []


def test_quantized_and_not_do_not_fit() -> None:
    (problem,) = lines({"quantization_config": {"quant_method": "fp8"}}, {})
    assert problem.startswith("one of them is quantized: ")


def test_numbers_that_are_none_of_a_floats_are_compared() -> None:
    assert differences({"rope_theta": 10**400}, {"rope_theta": 1e4})


def test_a_file_that_the_configuration_class_refuses_is_compared_as_it_is() -> None:
    ours = {**QWEN, "rope_scaling": {"type": "yarn", "factor": "many"}}
    assert "rope_parameters" in " ".join(lines(ours, QWEN))
