"""What a worker says of a checkpoint's configuration, by the installed transformers and vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside import fit
from tests.tiny import make_tiny_checkpoint
from tests.unit.engines.vllm_models import vllm_model

pytestmark = pytest.mark.usefixtures("vllm")

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model_config(directory: Path, overrides: Any = None) -> Any:
    """As vLLM's, of a server that was started with this directory a while ago."""
    import transformers

    (directory / "config.json").write_text(json.dumps(CONFIG))
    given = SimpleNamespace(
        model=str(directory), hf_config_path=None, hf_overrides=overrides or {}, hf_config=None
    )
    given._apply_dict_overrides = lambda config, nested: [
        setattr(config, key, value) for key, value in nested.items()
    ]
    given.hf_config = transformers.Qwen3Config.from_dict(dict(CONFIG))
    given.hf_config = fit._built(given, CONFIG)
    return given


def changed(given: Any, *, started_at: float = 4e9, **changes: Any) -> dict[str, Any]:
    """What differs between what is running and CONFIG with changes: ours and the server's value."""
    found = fit.configurations(given, {**CONFIG, **changes}, started_at=started_at)
    ours, theirs = found["pushed"], found["running"]
    return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs.get(key)}


def test_spellings_of_the_same_are_the_same(tmp_path: Path) -> None:
    given = model_config(tmp_path)
    assert changed(given) == {}
    assert changed(given, rope_scaling=None, torch_dtype="float32", head_dim=128) == {
        "dtype": ("float32", None)
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    assert changed(given, rope_theta=None, rope_parameters=rope) == {}
    (ours, theirs) = changed(given, rope_theta=None, rope_parameters=YARN)["rope_parameters"]
    assert ours == YARN and theirs == rope


@pytest.mark.parametrize("overrides", [{"rope_parameters": YARN}, {"rms_norm_eps": 1e-3}])
def test_arguments_of_the_server_apply_to_both(tmp_path: Path, overrides: dict[str, Any]) -> None:
    given = model_config(tmp_path, overrides)
    key = next(iter(overrides))
    assert fit.configurations(given, CONFIG, started_at=4e9)["running"][key] == overrides[key]
    assert changed(given, **overrides) == changed(given) == {}


def test_what_vllm_changes_itself_is_no_difference(tmp_path: Path) -> None:
    given = model_config(tmp_path)
    given.hf_config.num_labels_of_vllm = 3
    given.hf_config.rms_norm_eps = 0.5
    assert changed(given) == {}


def test_a_directory_that_changed_since_the_start_says_nothing(tmp_path: Path) -> None:
    given = model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5}))
    found = changed(given, started_at=1.0, rms_norm_eps=1e-5)
    assert found == {"rms_norm_eps": (1e-5, 1e-6)}


@pytest.mark.parametrize("moved", ["link", "directory", "file"])
def test_what_leads_to_a_file_is_part_of_whether_it_changed(tmp_path: Path, moved: str) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "latest").symlink_to(real)
    file = tmp_path / "latest" / "config.json"
    file.write_text("{}")
    times = {
        "link": (tmp_path / "latest").lstat().st_ctime,
        "directory": real.stat().st_ctime,
        "file": file.stat().st_ctime,
    }
    assert fit._unchanged_since(file, max(times.values()) + 1)
    assert not fit._unchanged_since(file, times[moved])


def test_a_configuration_that_the_class_refuses_is_left_to_the_push(tmp_path: Path) -> None:
    given = model_config(tmp_path)
    found = fit.configurations(given, {**CONFIG, "hidden_size": "wide"}, started_at=4e9)
    assert found["pushed"] is None and found["running"]["hidden_size"] == 8


@pytest.mark.parametrize("tied", [True, False])
def test_vllms_own_loader_says_what_it_takes(tmp_path: Path, tied: bool) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "a", seed=1, tie_word_embeddings=tied)
    expected = {
        "model.embed_tokens.weight": "loaded",
        "model.layers.1.self_attn.k_proj.weight": "loaded",
        "model.layers.1.self_attn.rotary_emb.inv_freq": "ignored",
        "model.layers.7.self_attn.k_proj.weight": "refused",
        "mtp.fc.weight": "refused",
    }
    with vllm_model(checkpoint) as model:
        found = fit.uses(model, [(name, "float32", [2, 2]) for name in expected])
        assert dict(zip(expected, found, strict=True)) == expected
        assert fit.uses(model, []) == []
        assert fit.ties_output(model) is tied
