"""What an update did not fill, in models of vLLM's own classes with vLLM's own counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny import make_tiny_checkpoint
from tests.unit.engines.layout_loads import KINDS
from tests.unit.engines.vllm_models import vllm_model

pytestmark = pytest.mark.usefixtures("vllm")

EXPERTS = "model.layers.0.mlp.experts"
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "model.layers.1.mlp.gate": ("Glm4MoeConfig", {"n_routed_experts": 4}),
    "model.layers.1.mlp": ("ExaoneMoeConfig", {"num_experts": 4}),
}
"""Models whose routers correct the scores of experts, by the layer that has the bias."""
RANKS = [(0, 1, False), (1, 2, False), (0, 2, True), (1, 2, True)]
"""Rank, ranks, and whether ranks have different experts."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("completeness")
    return {
        kind: make_tiny_checkpoint(root / kind, seed=3, dtype="bfloat16", **arguments)
        for kind, arguments in KINDS.items()
    }


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = load_file(checkpoint / "model.safetensors")
    return tensors


def stacked(tensors: dict[str, Any], experts: int) -> dict[str, Any]:
    """With one tensor for all experts of a layer, as newer checkpoints have them."""
    import torch

    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(experts)]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        fused[f"{prefix}.gate_up_proj"] = torch.stack(both)
        fused[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    return fused


def quantized(checkpoint: Path, directory: Path) -> Path:
    """A copy whose experts are in fp8, with a scale of each tensor."""
    import torch
    from safetensors.torch import save_file

    attention = [
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"
    ]
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": attention}
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    tensors = tensors_of(checkpoint)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.tensor(2.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def routed_checkpoint(directory: Path, config_class: str, sizes: dict[str, Any]) -> Path:
    """A checkpoint of such a model, with biases that are not zero."""
    import torch
    import transformers

    width = dict.fromkeys(("vocab_size", "hidden_size", "moe_intermediate_size"), 64)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    common = {**width, **heads, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    config = getattr(transformers, config_class)(**common, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.fill_(0.5)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@contextmanager
def updates(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that loads tensors as an update does, in so many calls, and says what is missing.
    Layers are not processed: their kernels are made when a server starts.
    """
    from vllm.model_executor.model_loader.reload import (
        initialize_layerwise_reload,
        layerwise,
        record_metadata_for_reloading,
    )

    from skyctl.engines.vllm.inside.completeness import missing_parameters
    from skyctl.engines.vllm.inside.experts import tied_layers

    def process(layer: Any, info: Any) -> None:
        layerwise._place_kernel_tensors(layer, info)
        info.reset()

    monkeypatch.setattr(layerwise, "_layerwise_process", process)
    tied = {name for name, _ in tied_layers(model)}
    record_metadata_for_reloading(model)

    def update(tensors: dict[str, Any], calls: int = 2) -> list[str]:
        initialize_layerwise_reload(model)
        items = list(tensors.items())
        for call in range(calls):
            model.load_weights(items[call::calls])
        missing = missing_parameters(model, tied)
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                process(layer, info)
        return missing

    yield update


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "ranks", "expert_parallel"), RANKS)
def test_a_whole_checkpoint_leaves_nothing_missing(
    checkpoints: dict[str, Path],
    kind: str,
    rank: int,
    ranks: int,
    expert_parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = tensors_of(checkpoints[kind])
    placed = {"rank": rank, "ranks": ranks, "expert_parallel": expert_parallel}
    with (
        vllm_model(checkpoints[kind], **placed) as model,
        updates(model, monkeypatch) as update,
    ):
        assert update(tensors) == []
        if kind == "experts":
            assert update(stacked(tensors, 4)) == []


@pytest.mark.parametrize(("rank", "ranks", "expert_parallel"), RANKS)
def test_each_part_of_an_expert_that_lacks_is_named_where_it_is_held(
    checkpoints: dict[str, Path],
    rank: int,
    ranks: int,
    expert_parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = tensors_of(checkpoints["experts"])
    placed = {"rank": rank, "ranks": ranks, "expert_parallel": expert_parallel}
    with (
        vllm_model(checkpoints["experts"], **placed) as model,
        updates(model, monkeypatch) as update,
    ):
        for expert in range(4):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"{EXPERTS}.{expert}.{part}.weight"
                missing = update({n: t for n, t in tensors.items() if n != name})
                held = not expert_parallel or expert // 2 == rank
                lacking = f"{EXPERTS}.routed_experts (no {part} of expert {expert})"
                assert missing == ([lacking] if held else []), name


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_each_part_of_a_quantized_expert_that_lacks_is_named(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    expert_parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What quantizing has beside the weights must be there for all experts, or for none."""
    checkpoint = quantized(checkpoints["experts"], tmp_path / "quantized")
    tensors = tensors_of(checkpoint)
    with (
        vllm_model(checkpoint, ranks=2, expert_parallel=expert_parallel) as model,
        updates(model, monkeypatch) as update,
    ):
        assert update(tensors) == []
        assert update({n: t for n, t in tensors.items() if "weight_scale" not in n}) == []
        for expert in (1, 3):
            for part, called in (
                ("up_proj.weight", "up_proj"),
                ("down_proj.weight_scale", "down_proj weight_scale"),
            ):
                name = f"{EXPERTS}.{expert}.{part}"
                missing = update({n: t for n, t in tensors.items() if n != name})
                lacking = f"{EXPERTS}.routed_experts (no {called} of expert {expert})"
                assert missing == ([] if expert_parallel and expert == 3 else [lacking]), name


@pytest.mark.parametrize("buffer_kept", [True, False])
def test_what_no_checkpoint_has_and_what_is_loaded_uncounted_is_not_missing(
    checkpoints: dict[str, Path], buffer_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax-M2's layers of experts have a bias of their own, Gemma 4's routers a constant."""
    import torch

    tensors = tensors_of(checkpoints["experts"])
    with vllm_model(checkpoints["experts"]) as model:
        layer = model.get_submodule("model.layers.0.mlp")
        layer.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4))
        norm = model.get_submodule("model.norm")
        norm.register_buffer("root_size", torch.ones(()), persistent=not buffer_kept)
        with updates(model, monkeypatch) as update:
            # vLLM would overwrite one that is not kept
            assert update(tensors) == ([] if buffer_kept else ["model.norm"])
            del tensors["model.norm.weight"]
            assert update(tensors) == ["model.norm"]


@pytest.mark.parametrize("layer", ROUTED)
def test_a_bias_of_a_router_that_lacks_is_named_by_each_way_of_the_loader(
    tmp_path: Path, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads it in place, uncounted. Where it is zero, no checkpoint may have had it."""
    from skyctl.engines.vllm.inside import engine as engines
    from skyctl.engines.vllm.inside import worker as workers

    checkpoint = routed_checkpoint(tmp_path / "routed", *ROUTED[layer])
    tensors = tensors_of(checkpoint)
    bias = [name for name in tensors if name.endswith(".e_score_correction_bias")][-1]
    short = {name: tensor for name, tensor in tensors.items() if name != bias}
    lacking = rf"1 layers of the model .* {layer} \(no e_score_correction_bias\)$"
    with vllm_model(checkpoint) as model, updates(model, monkeypatch) as update:
        for module in (engines, workers):
            monkeypatch.setattr(module, "update_problem", lambda model: "")
        engine: Any = engines.SkyctlWeightTransferEngine.__new__(engines.SkyctlWeightTransferEngine)
        engine.model, engine.model_config = model, SimpleNamespace(dtype=model.lm_head.weight.dtype)
        engine._tied, engine._receiver = set(), None
        worker = workers.SkyctlWorkerExtension()
        worker.model_runner = SimpleNamespace(get_model=lambda: model)

        def reload(pushed: dict[str, Any]) -> None:
            worker.skyctl_watch_reload()
            update(pushed, calls=1)
            worker.skyctl_repack_tied()

        for load in (engine.load_whole, reload):
            for _ in range(2):
                with pytest.raises(RuntimeError, match=lacking):
                    load(short)
                load(tensors)
        model.get_submodule(layer).e_score_correction_bias.data.zero_()
        engine.load_whole(short)


def test_what_a_model_writes_to_a_buffer_by_itself_is_missing(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an EAGLE-3 draft model does with `mask_hidden`: the session throws it away."""
    import torch

    with vllm_model(checkpoints["dense"]) as model:
        model.model.norm.register_buffer("mask_hidden", torch.ones(2), persistent=False)
        own = model.load_weights

        def load_weights(items: list[Any]) -> None:
            own(items)
            model.model.norm.mask_hidden.copy_(torch.full((2,), 2.0))

        with updates(model, monkeypatch) as update:
            tensors = tensors_of(checkpoints["dense"])
            assert update(tensors) == []
            monkeypatch.setattr(model, "load_weights", load_weights)
            assert update(tensors) == ["model.norm"]


def test_what_lacks_of_stacked_or_many_experts_is_told_in_short(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(checkpoints["experts"])
    with (
        vllm_model(checkpoints["experts"]) as model,
        updates(model, monkeypatch) as update,
    ):
        fused = stacked(tensors, 4)
        del fused[f"{EXPERTS}.down_proj"]
        lacking = ", ".join(f"down_proj of expert {expert}" for expert in range(3))
        assert update(fused) == [f"{EXPERTS}.routed_experts (no {lacking}, 1 more)"]
        none = {n: t for n, t in tensors.items() if not n.startswith(EXPERTS)}
        assert update(none) == [f"{EXPERTS}.routed_experts"]


def test_padded_experts_are_whole_when_every_part_was_loaded(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(checkpoints["experts"])
    with vllm_model(checkpoints["experts"]) as model:
        for layer in model.modules():
            for parameter in layer._parameters.values():
                if hasattr(parameter, "weight_loader_numel"):  # not in older versions
                    parameter.weight_loader_numel += 64
        with updates(model, monkeypatch) as update:
            assert update(tensors) == []
            assert update(stacked(tensors, 4)) == []
            del tensors[f"{EXPERTS}.3.up_proj.weight"]
            lacking = "no up_proj of expert 3"
            assert update(tensors) == [f"{EXPERTS}.routed_experts ({lacking})"]


def test_padded_experts_of_gpt_oss_are_whole_when_each_expert_was_loaded(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class has its own loader, which takes gate and up in one and calls them by other names.
    Of a rank that is not the first, padding takes the place of weights: its elements lack."""
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    tensors = tensors_of(checkpoints["experts"])
    with vllm_model(checkpoints["experts"]) as model:
        layer = model.get_submodule(f"{EXPERTS}.routed_experts")
        layer.__class__ = GptOssRoutedExperts
        for parameter in (layer.w13_weight, layer.w2_weight):
            parameter.weight_loader = layer.weight_loader
            parameter.weight_loader_numel = parameter.numel() + 64
        fused = stacked(tensors, 4)
        parts = {"w13": fused.pop(f"{EXPERTS}.gate_up_proj")}
        parts["w2"] = fused.pop(f"{EXPERTS}.down_proj")
        one_by_one = {(part, e): t.t() for part, all_ in parts.items() for e, t in enumerate(all_)}
        own = model.load_weights

        def load_weights(items: list[Any]) -> None:
            own([(name, tensor) for name, tensor in items if isinstance(name, str)])
            for name, tensor in items:
                if isinstance(name, tuple):
                    part, expert = name
                    parameter = getattr(layer, f"{part}_weight")
                    how = {"shard_id": f"gpt_oss_{part}", "expert_id": expert}
                    parameter.weight_loader(parameter, tensor, f"{part}_weight", **how)

        monkeypatch.setattr(model, "load_weights", load_weights)
        with updates(model, monkeypatch) as update:
            assert update({**fused, **one_by_one}) == []
            del one_by_one["w2", 3]
            lacking = "no down_proj of expert 3"
            assert update({**fused, **one_by_one}) == [f"{EXPERTS}.routed_experts ({lacking})"]


def test_experts_that_take_adapters_are_looked_at_too(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(checkpoints["experts"])
    with (
        vllm_model(checkpoints["experts"]) as model,
        updates(model, monkeypatch) as update,
    ):
        layer = model.get_submodule(f"{EXPERTS}.routed_experts")
        own = layer._modules.pop("quant_method")
        layer.quant_method = SimpleNamespace(old_quant_method=own)  # `FusedMoEModularMethod`
        assert update(tensors) == []
        del tensors[f"{EXPERTS}.0.down_proj.weight"]
        assert update(tensors) == [f"{EXPERTS}.routed_experts (no down_proj of expert 0)"]


def test_a_reload_of_vllms_own_that_did_not_fill_the_model_fails_once(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension

    tensors = tensors_of(checkpoints["tied"])
    short = {n: t for n, t in tensors.items() if n != "model.layers.1.self_attn.v_proj.weight"}
    with (
        vllm_model(checkpoints["tied"]) as model,
        updates(model, monkeypatch) as update,
    ):
        worker = SkyctlWorkerExtension()
        worker.model_runner = SimpleNamespace(get_model=lambda: model)
        worker.skyctl_watch_reload()  # of a push that ended before its reload
        for _ in range(2):
            worker.skyctl_watch_reload()
            update(short, calls=1)
            with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.qkv_proj"):
                worker.skyctl_repack_tied()
            worker.skyctl_watch_reload()
            update(tensors, calls=1)
            worker.skyctl_repack_tied()
        assert update(tensors) == [] and "load_weights" not in vars(model)
