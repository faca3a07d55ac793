"""A checkpoint against the one that the servers run."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.compat import (
    check_compatible,
    compare_configs,
    compare_tensors,
    reference,
)
from skyctl.errors import PreflightError
from tests.unit.push.checkpoints import CONFIG, filled, tiny_tensors, write_checkpoint


def problems(
    tmp_path: Path, tensors: dict, config: dict = CONFIG, base: dict = CONFIG
) -> list[str]:
    theirs = write_checkpoint(tmp_path / "base", config=base)
    ours = write_checkpoint(tmp_path / "ours", tensors, config=config)
    with pytest.raises(PreflightError) as caught:
        check_compatible(read_checkpoint(str(ours)), str(theirs))
    found: list[str] = caught.value.details["problems"]
    assert found[0] in caught.value.message
    return found


def test_the_same_model_with_other_numbers_fits(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    ours = write_checkpoint(tmp_path / "ours", tiny_tensors(99), shards=2)
    assert check_compatible(read_checkpoint(str(ours)), str(base)) == []


def test_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {**tiny_tensors(), name: filled([32, 8], 1)}
    assert problems(tmp_path, tensors) == [f"{name} is [32, 8] here, the servers run [16, 8]"]


def test_a_missing_and_an_extra_tensor_are_named(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.9.extra"] = tensors.pop("model.norm.weight")
    assert problems(tmp_path, tensors) == [
        "model.layers.9.extra [8] is not in the model the servers run",
        "model.norm.weight is missing, the servers run [8]",
    ]


def test_another_architecture_is_named(tmp_path: Path) -> None:
    other = {**CONFIG, "architectures": ["OtherForCausalLM"]}
    found = problems(tmp_path, tiny_tensors(), config=other)
    assert found == ["architectures is OtherForCausalLM here, the servers run TinyForCausalLM"]


def test_another_dtype_is_a_note(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    tensors = {**tiny_tensors(), "model.norm.weight": filled([8], 1, "BF16")}
    ours = write_checkpoint(tmp_path / "ours", tensors)
    (note,) = check_compatible(read_checkpoint(str(ours)), str(base))
    assert "model.norm.weight is BF16 here, F32" in note
    assert "cast" in note


def test_a_tied_output_layer_may_be_left_out() -> None:
    base = read_tensors(tiny_tensors())
    ours = [tensor for tensor in base if tensor.name != "lm_head.weight"]
    assert compare_tensors(ours, base, tied=True) == []
    assert compare_tensors(base, ours, tied=True) == []
    assert compare_tensors(ours, base) == ["lm_head.weight is missing, the servers run [16, 8]"]


def read_tensors(tensors: dict) -> list:
    from skyctl.checkpoints.header import Tensor

    return [Tensor(n, d, tuple(s), 0, 0, len(b)) for n, (d, s, b) in tensors.items()]


def test_rope_theta_is_compared_wherever_it_is_written() -> None:
    old, new = {"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e6}}
    assert compare_configs(old, {"rope_parameters": {"rope_theta": 1e4}}) == []
    assert compare_configs(old, new) == ["rope_theta is 10000 here, the servers run 1e+06"]
    assert compare_configs(old, {"rope_theta": 10**400}) == []  # no number of a float's


def test_a_nested_text_config_is_looked_into() -> None:
    ours = {"text_config": {"hidden_size": 8}}
    assert compare_configs(ours, {"text_config": {"hidden_size": 16}}) == [
        "hidden_size is 8 here, the servers run 16"
    ]


def test_quantized_and_not_do_not_fit() -> None:
    (problem,) = compare_configs({"quantization_config": {"quant_method": "fp8"}}, {})
    assert "quantized" in problem


@pytest.mark.parametrize("base", [None, "org/not-here"])
def test_an_unknown_base_is_a_weaker_check_and_says_so(tmp_path: Path, base: str | None) -> None:
    ours = read_checkpoint(str(write_checkpoint(tmp_path / "ours")))
    (note,) = check_compatible(ours, base)
    assert "were not compared" in note


def test_a_base_without_tensors_is_compared_by_its_config(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    (base / "model.safetensors").unlink()
    ours = read_checkpoint(str(write_checkpoint(tmp_path / "ours")))
    (note,) = check_compatible(ours, str(base))
    assert "only its config.json" in note


def test_what_was_pushed_last_is_the_measure_only_where_the_launched_model_is_gone(
    tmp_path: Path,
) -> None:
    # a trainer that saves every step to one directory overwrites what it pushed last
    assert reference(str(tmp_path), "runs/latest") == str(tmp_path)
    assert reference("nobody/nothing-here", "runs/latest") == "runs/latest"
    assert reference("nobody/nothing-here", None) == "nobody/nothing-here"
