"""A checkpoint against the one that the servers run."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.compat import Answer, check_compatible, read_running, reference
from skyctl.errors import PreflightError
from skyctl.wire.messages import TensorUse
from tests.unit.push.checkpoints import CONFIG, change_index, filled, tiny_tensors, write_checkpoint


def problems(
    tmp_path: Path, tensors: dict, config: dict = CONFIG, base: dict = CONFIG
) -> list[str]:
    theirs = write_checkpoint(tmp_path / "base", config=base)
    ours = write_checkpoint(tmp_path / "ours", tensors, config=config)
    with pytest.raises(PreflightError) as caught:
        check_compatible(read_checkpoint(str(ours)), read_running(str(theirs)))
    found: list[str] = caught.value.details["problems"]
    assert found[0] in caught.value.message
    return found


def test_the_same_model_with_other_numbers_fits(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    ours = write_checkpoint(tmp_path / "ours", tiny_tensors(99), shards=2)
    assert check_compatible(read_checkpoint(str(ours)), read_running(str(base))) == []


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
    (note,) = check_compatible(read_checkpoint(str(ours)), read_running(str(base)))
    assert "model.norm.weight is BF16 here, F32" in note
    assert "cast" in note


def checked(
    tmp_path: Path,
    ours: dict,
    theirs: dict,
    *answers: Answer,
    config: dict = CONFIG,
    base_config: dict | None = None,
) -> list[str]:
    """Notes on a checkpoint of these tensors, for servers started with those."""
    base = write_checkpoint(tmp_path / "base", theirs, config=base_config or config)
    mine = write_checkpoint(tmp_path / "ours", ours, config=config)
    return check_compatible(read_checkpoint(str(mine)), read_running(str(base)), answers)


def answer(*, ties_output: bool = False, **uses: str) -> Answer:
    named = {name.replace("__", "."): TensorUse(use) for name, use in uses.items()}
    return Answer(CONFIG, CONFIG, named, ties_output)


HEAD = "lm_head.weight"
PREDICTING = {"mtp.fc.weight": filled([8, 16], 3), "model.layers.2.eh_proj.weight": filled([8], 3)}
TIED = {**CONFIG, "tie_word_embeddings": True}


def test_a_tied_output_layer_may_be_left_out(tmp_path: Path) -> None:
    whole = tiny_tensors()
    whole[HEAD] = whole["model.embed_tokens.weight"]
    without = {name: tensor for name, tensor in whole.items() if name != HEAD}
    for config, answers in ((TIED, ()), (CONFIG, [answer(ties_output=True)])):
        assert checked(tmp_path / "a", without, whole, *answers, config=config) == []
        assert checked(tmp_path / "b", whole, without, *answers, config=config) == []
    for answers in ((), [answer(lm_head__weight="loaded")]):
        with pytest.raises(PreflightError, match=r"lm_head.weight is missing, .* run \[16, 8\]"):
            checked(tmp_path / "c", without, whole, *answers)


@pytest.mark.parametrize("answers", [(), (answer(ties_output=True),)])
def test_an_output_layer_of_its_own_does_not_fit_where_servers_tie_it(
    tmp_path: Path, answers: tuple[Answer, ...]
) -> None:
    whole = tiny_tensors()  # the two differ
    without = {name: tensor for name, tensor in whole.items() if name != HEAD}
    with pytest.raises(PreflightError, match=r"lm_head.weight differs from model.embed_tokens"):
        checked(tmp_path, whole, without, *answers, config=TIED)


@pytest.mark.parametrize("answers", [(), (answer(lm_head__weight="loaded"),)])
def test_a_tied_checkpoint_does_not_fit_where_servers_have_an_output_layer_of_its_own(
    tmp_path: Path, answers: tuple[Answer, ...]
) -> None:
    # vLLM 0.32 unties what is tied by its configuration and has two weights
    whole = tiny_tensors()
    without = {name: tensor for name, tensor in whole.items() if name != HEAD}
    with pytest.raises(PreflightError, match=r"lm_head.weight is missing"):
        checked(tmp_path, without, whole, *answers, config=TIED)
    assert checked(tmp_path / "both", whole, whole, *answers, config=TIED) == []


def test_an_untied_checkpoint_without_an_output_layer_does_not_fit(tmp_path: Path) -> None:
    without = {name: tensor for name, tensor in tiny_tensors().items() if name != HEAD}
    untied = {**CONFIG, "tie_word_embeddings": False}
    with pytest.raises(PreflightError, match="missing, and tie_word_embeddings is false"):
        checked(tmp_path, without, without, config=untied, base_config=TIED)


def test_what_the_servers_never_load_need_not_be_in_a_checkpoint(tmp_path: Path) -> None:
    base = {**tiny_tensors(), **PREDICTING}
    ignored = {name.replace(".", "__"): "ignored" for name in PREDICTING}
    assert checked(tmp_path / "a", tiny_tensors(), base, answer(**ignored)) == []
    (note,) = checked(tmp_path / "b", base, tiny_tensors(), answer(**ignored))
    assert note == "the servers load nothing of model.layers.2.eh_proj.weight and 1 more"
    # a server that loads one of them needs it
    some = {**ignored, "mtp__fc__weight": "loaded"}
    with pytest.raises(PreflightError, match=r"mtp.fc.weight is missing"):
        checked(tmp_path / "c", tiny_tensors(), base, answer(**ignored), answer(**some))


def test_without_an_answer_prediction_heads_are_known_by_their_names(tmp_path: Path) -> None:
    base = {**tiny_tensors(), **PREDICTING}
    config = {**CONFIG, "num_nextn_predict_layers": 1}
    assert checked(tmp_path / "a", tiny_tensors(), base, config=config) == []
    with pytest.raises(PreflightError, match=r"eh_proj.weight is missing"):
        checked(tmp_path / "b", tiny_tensors(), base)


def test_an_index_is_judged_by_what_the_servers_need(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", shards=2)
    ours = write_checkpoint(tmp_path / "ours", tiny_tensors(50), shards=2)
    change_index(base, {"mtp.fc.weight": "model-00001-of-00002.safetensors"})
    change_index(ours, {"mtp.fc.weight": "model-00001-of-00002.safetensors"})
    checkpoint = read_checkpoint(str(ours))
    assert checkpoint.absent == ("mtp.fc.weight",)
    assert check_compatible(checkpoint, read_running(str(base))) == []
    with pytest.raises(PreflightError, match=r"mtp.fc.weight is in its index, and in none of its"):
        check_compatible(checkpoint, read_running(None))


def test_a_difference_that_is_allowed_by_name_is_no_problem(tmp_path: Path) -> None:
    base = read_running(str(write_checkpoint(tmp_path / "base", config={**CONFIG, "eps": 1e-6})))
    config = {**CONFIG, "eps": 1e-5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    ours = read_checkpoint(str(write_checkpoint(tmp_path / "ours", config=config)))
    with pytest.raises(PreflightError) as caught:
        check_compatible(ours, base, allowed=["rope_parameters.factor"])
    assert caught.value.details["problems"] == [
        "eps is 1e-05 here, the servers run 1e-06",
        "rope_parameters.rope_type is yarn here, the servers run default",
    ]
    assert caught.value.hint.endswith(": --allow-config eps --allow-config rope_parameters")
    for allowed in (["eps", "rope_parameters"], ["*"]):
        assert check_compatible(ours, base, allowed=allowed) == []


def test_servers_say_what_they_compute_by(tmp_path: Path) -> None:
    # an argument changed it, or the directory was overwritten since
    base = read_running(str(write_checkpoint(tmp_path / "base", config={**CONFIG, "eps": 1e-5})))
    ours = read_checkpoint(str(write_checkpoint(tmp_path / "ours", config={**CONFIG, "eps": 1e-5})))
    running, pushed = {"eps": 1e-6, "rope": 1}, {"eps": 1e-6, "rope": 1}
    assert check_compatible(ours, base, [Answer(running, pushed, {}, False)]) == []
    with pytest.raises(PreflightError, match="eps is 1e-05 here, the servers run 1e-06"):
        check_compatible(ours, base, [Answer(running, {**pushed, "eps": 1e-5}, {}, False)])
    # a server that cannot read it leaves the comparison to this side
    with pytest.raises(PreflightError, match="eps is 1e-05 here, the servers run 1e-06"):
        check_compatible(ours, base, [Answer({**CONFIG, "eps": 1e-6}, None, {}, False)])


@pytest.mark.parametrize("base", [None, "org/not-here"])
def test_an_unknown_base_is_a_weaker_check_and_says_so(tmp_path: Path, base: str | None) -> None:
    ours = read_checkpoint(str(write_checkpoint(tmp_path / "ours")))
    (note,) = check_compatible(ours, read_running(base))
    assert "were not compared" in note


def test_a_base_without_tensors_is_compared_by_its_config(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    (base / "model.safetensors").unlink()
    ours = read_checkpoint(str(write_checkpoint(tmp_path / "ours")))
    (note,) = check_compatible(ours, read_running(str(base)))
    assert "only its config.json" in note


def test_what_was_pushed_last_is_the_measure_only_where_the_launched_model_is_gone(
    tmp_path: Path,
) -> None:
    # a trainer that saves every step to one directory overwrites what it pushed last
    assert reference(str(tmp_path), "runs/latest") == str(tmp_path)
    assert reference("nobody/nothing-here", "runs/latest") == "runs/latest"
    assert reference("nobody/nothing-here", None) == "nobody/nothing-here"
