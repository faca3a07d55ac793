"""What is refused of an adapter before anything is sent, and what memory is written as."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from skyctl.adapters.peft import WEIGHTS, check_fits, read_adapter
from skyctl.adapters.tensors import write_adapter
from skyctl.errors import NotFoundError, PreflightError, SkyctlError, UsageError
from tests.unit.adapters.files import UP, lora, make_adapter, make_model

EMBEDDINGS = "base_model.model.model.embed_tokens"
ATTENTION = "base_model.model.model.layers.0.self_attn.q_proj"


def fits(adapter: Path, model: Path | str | None, **options: Any) -> list[str]:
    arguments = {"max_rank": 8, "bases": [str(model)], **options}
    return check_fits(read_adapter(str(adapter)), model=model and str(model), **arguments)


def test_an_adapter_of_the_running_model_is_taken(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    both = {**lora(UP), **lora(ATTENTION, rows=8)}
    adapter = make_adapter(tmp_path / "one", both, base_model_name_or_path=str(model))
    assert fits(adapter, model) == []
    adapter_read = read_adapter(str(adapter))
    assert (adapter_read.rank, len(adapter_read.tensors)) == (4, 4)


def test_an_adapter_is_read_where_its_link_leads(tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to(directory)
    assert read_adapter(str(tmp_path / "latest")).path == directory  # recorded as its source


def test_another_byte_or_another_scale_is_another_digest(tmp_path: Path) -> None:
    made = (
        make_adapter(tmp_path / "a"),
        make_adapter(tmp_path / "b", value=0.25),
        make_adapter(tmp_path / "c", lora_alpha=16),
        make_adapter(tmp_path / "d"),
    )
    first, *others, same = [read_adapter(str(directory)).digest for directory in made]
    assert len({first, *others}) == 3
    assert same == first


Spoil = Callable[[Path], Any]
BROKEN: dict[str, tuple[Spoil, type[SkyctlError], str]] = {
    "nothing there": (lambda d: None, NotFoundError, "does not exist"),
    "a file": (lambda d: d.write_text(""), NotFoundError, "is a file"),
    "a whole checkpoint": (make_model, PreflightError, "has no adapter_config.json"),
    "pickled weights": (
        lambda d: (make_adapter(d) / WEIGHTS).rename(d / "adapter_model.bin"),
        PreflightError,
        "only adapter_model.bin",
    ),
    "cut off": (
        lambda d: (make_adapter(d) / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-4]),
        PreflightError,
        "truncated",
    ),
    "DoRA's tensors": (
        lambda d: make_adapter(d, {**lora(UP), f"{UP}.lora_magnitude_vector": (16,)}),
        PreflightError,
        "DoRA's magnitudes",
    ),
    "trained tokens": (
        lambda d: make_adapter(d, trainable_token_indices={"embed_tokens": [3]}),
        PreflightError,
        "trained tokens",
    ),
    "tensors of trained tokens": (
        lambda d: make_adapter(d, {**lora(UP), f"{EMBEDDINGS}.trainable_tokens_delta": (2, 8)}),
        PreflightError,
        "trained tokens",
    ),
    "whole embeddings": (
        lambda d: make_adapter(d, {**lora(UP), f"{EMBEDDINGS}.weight": (32, 8)}),
        PreflightError,
        "embeddings saved whole",
    ),
    "the base's embeddings": (
        lambda d: make_adapter(d, {**lora(UP), f"{EMBEDDINGS}.base_layer.weight": (32, 8)}),
        PreflightError,
        "embeddings saved whole",
    ),
    "a whole output layer": (
        lambda d: make_adapter(d, {**lora(UP), "base_model.model.lm_head.weight": (32, 8)}),
        PreflightError,
        "an output layer saved whole",
    ),
    "an adapter's name": (
        lambda d: make_adapter(d, {f"{UP}.lora_A.default.weight": (4, 8)}),
        PreflightError,
        "an adapter's name in its tensors' names",
    ),
    "whole experts": (
        lambda d: make_adapter(d, target_parameters=["mlp.experts.down_proj"]),
        PreflightError,
        "target_parameters",
    ),
    "a router of adapters": (
        lambda d: make_adapter(d, arrow_config={"top_k": 1}),
        PreflightError,
        "Arrow",
    ),
    "a base that it changed": (
        lambda d: make_adapter(d, init_lora_weights="pissa_niter_4"),
        PreflightError,
        "init_lora_weights='pissa_niter_4' has changed",
    ),
    "a key of the future": (
        lambda d: make_adapter(d, use_something_new=True),
        PreflightError,
        "sets use_something_new, which may change",
    ),
    "a text for the scale": (
        lambda d: make_adapter(d, lora_alpha="16"),
        PreflightError,
        "lora_alpha is '16'",
    ),
    "another method": (lambda d: make_adapter(d, peft_type="IA3"), PreflightError, "IA3"),
    "DoRA": (lambda d: make_adapter(d, use_dora=True), PreflightError, "DoRA"),
    "biases": (lambda d: make_adapter(d, bias="all"), PreflightError, "trained biases"),
    "saved modules": (
        lambda d: make_adapter(d, modules_to_save=["lm_head"]),
        PreflightError,
        "modules_to_save",
    ),
    "half a module": (
        lambda d: make_adapter(d, {f"{UP}.lora_A.weight": (4, 8)}),
        PreflightError,
        "lora_A alone",
    ),
    "no LoRA": (
        lambda d: make_adapter(d, {"x.weight": (4, 8)}),
        PreflightError,
        "does not belong to",
    ),
    "ranks": (lambda d: make_adapter(d, lora(UP, rank=2)), PreflightError, "rank 2 in lora_A"),
    "no rank": (lambda d: make_adapter(d, r=None), PreflightError, "lacks a rank"),
    "NaN": (lambda d: make_adapter(d, value=float("nan")), PreflightError, "NaN"),
    "no scale": (
        lambda d: make_adapter(d, lora_alpha=float("nan")),
        PreflightError,
        "alpha is nan",
    ),
    "no scale of a module": (
        lambda d: make_adapter(d, alpha_pattern={"q_proj": float("nan")}),
        PreflightError,
        "q_proj is nan",
    ),
    "a text for a scale": (
        lambda d: make_adapter(d, alpha_pattern={"q_proj": "16"}),
        PreflightError,
        "q_proj is '16'",
    ),
    "no scales": (
        lambda d: make_adapter(d, alpha_pattern=[16]),
        PreflightError,
        "is not a mapping",
    ),
    "no pattern": (lambda d: make_adapter(d, rank_pattern=[4]), PreflightError, "is not a mapping"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_directory_that_is_not_an_adapter_is_refused_with_what_it_is(
    tmp_path: Path, case: str
) -> None:
    spoil, error, words = BROKEN[case]
    spoil(tmp_path / "one")
    with pytest.raises(error, match=words) as caught:
        read_adapter(str(tmp_path / "one"))
    configured = (
        "cut off",
        "half a module",
        "no LoRA",
        "ranks",
        "no rank",
        "no scale",
        "no pattern",
    )
    assert caught.value.hint or case in configured or "scale" in case


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True, "init_lora_weights": "EVA", "eva_config": {"rho": 2}},
        {"rank_pattern": {"up_proj": 4}, "alpha_pattern": {"up_proj": 64}, "use_dora": False},
        {"layers_to_transform": [0], "lora_ga_config": {"bsz": 2}, "peft_version": "0.19.0"},
        {"qalora_group_size": 16, "megatron_core": "megatron.core", "something_new": None},
    ],
)
def test_settings_that_servers_compute_as_peft_does_are_taken(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    assert read_adapter(str(make_adapter(tmp_path / "one", **config))).rank == 4


def test_an_adapter_that_changes_nothing_is_taken_with_a_note(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    (note,) = fits(make_adapter(tmp_path / "one", value=0.0), model)
    assert note == "its weights are zero: it answers as the model without an adapter does"


@pytest.mark.parametrize(
    ("base", "fleet", "same"),
    [
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B", True),
        ("unsloth/Qwen3-8B-bnb-4bit", "/models/Qwen3-8B/", True),
        ("unsloth/Qwen3-4B-bnb-4bit", "Qwen/Qwen3-8B", False),
    ],
)
def test_a_base_of_fewer_bits_is_the_model_that_it_was_made_of(
    tmp_path: Path, base: str, fleet: str, same: bool
) -> None:
    adapter = read_adapter(str(make_adapter(tmp_path / "one", base_model_name_or_path=base)))
    with nullcontext() if same else pytest.raises(PreflightError, match="was trained on"):
        check_fits(adapter, model=None, bases=[fleet], max_rank=None)


def test_an_adapter_that_does_not_fit_the_running_model_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    elsewhere = "base_model.model.model.layers.7.mlp.up_proj"
    misfits = {
        "no_such_layer": (lora(elsewhere), "layers.7.mlp.up_proj is not in the model"),
        "inputs": (lora(UP, columns=6), "6 inputs in the adapter, 8 in the servers"),
        "outputs": (lora(UP, rows=6), "6 outputs in the adapter, 16 in the servers"),
        "norm": (lora("base_model.model.model.norm"), "neither a linear layer"),
    }
    for name, (tensors, words) in misfits.items():
        with pytest.raises(PreflightError, match=words):
            fits(make_adapter(tmp_path / name, tensors), model)
    with pytest.raises(PreflightError, match="rank 16, and this fleet takes 8") as caught:
        fits(make_adapter(tmp_path / "rank", lora(UP, rank=16), r=16), model)
    assert "max_rank: 16" in caught.value.hint


def test_embeddings_and_a_tied_output_layer_are_compared_with_their_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base")
    embedding = "base_model.model.model.embed_tokens.lora_embedding"
    tensors = {f"{embedding}_A": (4, 32), f"{embedding}_B": (8, 4)}
    tensors |= lora("base_model.model.lm_head", rows=32)
    assert fits(make_adapter(tmp_path / "one", tensors), model) == []
    with pytest.raises(PreflightError, match="33 inputs in the adapter, 32"):
        fits(make_adapter(tmp_path / "two", tensors | {f"{embedding}_A": (4, 33)}), model)


def test_an_adapter_of_another_base_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    model, other = make_model(tmp_path / "base"), make_model(tmp_path / "other")
    adapter = make_adapter(tmp_path / "one", base_model_name_or_path=str(other))
    with pytest.raises(PreflightError, match=r"was trained on .*other") as caught:
        fits(adapter, model)
    assert "--any-base" in caught.value.hint
    assert fits(adapter, model, any_base=True) == []
    for same in (str(model), "somebody/base", f"{model}/"):
        named = make_adapter(tmp_path / "named", base_model_name_or_path=same)
        assert fits(named, model) == []
    # the same name is not enough where the configuration is here to be compared
    namesake = make_model(tmp_path / "elsewhere" / "base", num_hidden_layers=9)
    make_model(tmp_path / "deep" / "base", num_hidden_layers=2)
    adapter = make_adapter(tmp_path / "two", base_model_name_or_path=str(namesake))
    with pytest.raises(PreflightError, match="num_hidden_layers is 9"):
        fits(adapter, tmp_path / "deep" / "base")


@pytest.mark.parametrize("base", ["~nobody-here/base", "x" * 300, "broken/base", "list/base"])
def test_a_base_that_cannot_be_read_is_compared_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in (("broken", "{"), ("list", "[]")):
        make_model(tmp_path / name / "base")
        (tmp_path / name / "base" / "config.json").write_text(config)
    model = make_model(tmp_path / "base")
    adapter = make_adapter(tmp_path / "one", base_model_name_or_path=base)
    if len(base) < 300:
        assert fits(adapter, model) == []
    else:
        with pytest.raises(PreflightError, match="was trained on x"):
            fits(adapter, model)


def test_a_model_that_is_not_here_is_left_to_the_servers(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "one", base_model_name_or_path="org/model")
    assert "shapes were not compared" in fits(adapter, "org/model")[0]
    assert "shapes were not compared" in fits(adapter, None, bases=[])[0]


def test_tensors_are_written_as_peft_would(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.randn(shape) for name, shape in lora(UP).items()}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    write_adapter([*tensors.items()], {"r": 4, "lora_alpha": 8}, tmp_path)
    written = read_adapter(str(tmp_path))
    assert written.config["target_modules"] == ["up_proj"]
    safetensors = pytest.importorskip("safetensors.torch")
    back = safetensors.load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_examined_where_they_are_and_not_read_again(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.randn(shape) for name, shape in lora(UP).items()}
    up = f"{UP}.lora_B.weight"

    def written(name: str, **changed: Any) -> Any:
        (tmp_path / name).mkdir()
        pairs = [*{**tensors, **changed}.items()]
        sent = write_adapter(pairs, {"r": 4, "lora_alpha": 8}, tmp_path / name)
        return read_adapter(str(tmp_path / name), sent)

    first, other = written("a"), written("b", **{up: tensors[up] * 2})
    assert first.digest != other.digest and not first.is_zero
    assert written("c").digest == first.digest
    assert written("d", **{up: torch.zeros_like(tensors[up])}).is_zero
    for value in (float("nan"), float("inf")):
        broken = tensors[up].clone()
        broken[3, 2] = value
        with pytest.raises(PreflightError, match=r"up_proj\.lora_B\.weight holds NaN or infinity"):
            written(f"e{value}", **{up: broken})
    with pytest.raises(PreflightError, match="is empty"):
        written("f", **{up: torch.empty(16, 0)})


def test_tensors_without_a_rank_or_that_are_none_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="lora_alpha"):
        write_adapter([("x", torch.zeros(1))], {"r": 4}, tmp_path)
    with pytest.raises(UsageError, match="pairs of a name"):
        write_adapter([("x", [1.0])], {"r": 4, "lora_alpha": 8}, tmp_path)


def test_a_path_that_is_too_long_does_not_exist() -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        read_adapter("/" + "a" * 5000)
