"""Servers that draft tokens: what they accept, and heads for them to draft with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.integration.fleet_cli import FleetCli, greedy
from tests.tiny import make_tiny_checkpoint

PROMPT, TOKENS = [40, 41, 42, 43], 24
_TAPPED = [0, 1]
"""The layers whose states a head is given: there are no more in the smallest model."""


def row(fleet: FleetCli) -> dict[str, Any]:
    """The only server of a fleet, as `status` has it."""
    (replica,) = fleet.data("status")["replicas"]
    return dict(replica)


def accepted(fleet: FleetCli, model: str) -> tuple[list[int], float]:
    """What the server answers, and the share of the tokens drafted for it that were accepted."""
    before = row(fleet)
    tokens = greedy(before["url"], model, PROMPT, TOKENS, key=fleet.key)
    after = row(fleet)
    drafted, taken = (after[key] - before[key] for key in ("draft_tokens", "accepted_tokens"))
    assert drafted > 0
    return tokens, taken / drafted


def write_predicting(directory: Path, seed: int, *, head: bool = True) -> Path:
    """A tiny model of MiMo's kind, a Qwen2 with a head that predicts a second token (MTP)."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny_checkpoint(directory, seed=seed)  # its tokenizer stays
    of_base = json.loads((directory / "config.json").read_text())
    file = directory / "model.safetensors"
    random = torch.Generator().manual_seed(seed)
    tensors = {k: v for k, v in load_file(file).items() if "_norm" not in k}  # Qwen2 has none
    for name in [
        name for name in tensors if "q_proj" in name or "k_proj" in name or "v_proj" in name
    ]:
        tensors[name.replace("weight", "bias")] = torch.zeros(tensors[name].shape[0])
    if head:
        hidden, prefix = of_base["hidden_size"], "model.mtp_layers.0"
        layer = {k: v for k, v in tensors.items() if k.startswith("model.layers.1.")}
        for name, tensor in layer.items():
            drawn = torch.randn(tensor.shape, generator=random) * 0.1
            tensors[name.replace("model.layers.1", prefix)] = drawn
        for name in ("token", "hidden", "final"):
            tensors[f"{prefix}.{name}_layernorm.weight"] = torch.ones(hidden)
        drawn = torch.randn([hidden, 2 * hidden], generator=random) * 0.1
        tensors[f"{prefix}.input_proj.weight"] = drawn
    save_file(tensors, file, metadata={"format": "pt"})
    config = {
        **of_base,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_head(
    base: Path, directory: Path, seed: int, dtype: str = "float32", *, embeddings: bool = False
) -> Path:
    """An EAGLE-3 head for the Qwen3 at `base`, of random weights: nothing that it drafts is
    accepted but by chance. It computes with the model's embeddings, of which it may have a copy.
    """
    import torch
    from safetensors.torch import load_file, save_file

    of_base = json.loads((base / "config.json").read_text())
    hidden, inner, size = (of_base[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = of_base["num_attention_heads"] * size, of_base["num_key_value_heads"] * size
    shapes = {
        "fc.weight": [hidden, len(_TAPPED) * hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [of_base["vocab_size"], hidden],
        "midlayer.hidden_norm.weight": [hidden],
        "midlayer.input_layernorm.weight": [hidden],
        "midlayer.post_attention_layernorm.weight": [hidden],
        "midlayer.self_attn.q_proj.weight": [heads, 2 * hidden],
        "midlayer.self_attn.k_proj.weight": [kv_heads, 2 * hidden],
        "midlayer.self_attn.v_proj.weight": [kv_heads, 2 * hidden],
        "midlayer.self_attn.o_proj.weight": [hidden, heads],
        "midlayer.mlp.gate_proj.weight": [inner, hidden],
        "midlayer.mlp.up_proj.weight": [inner, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, inner],
    }
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=random) * 0.1).to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }
    if embeddings:
        held = load_file(base / "model.safetensors")
        tensors["embed_tokens.weight"] = held["model.embed_tokens.weight"]
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    kept = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "vocab_size")
    config = {
        **{key: of_base[key] for key in (*kept, "num_key_value_heads", "rms_norm_eps")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": _TAPPED,
        "num_aux_hidden_states": len(_TAPPED),
        "draft_vocab_size": of_base["vocab_size"],
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))
    for file in base.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory
