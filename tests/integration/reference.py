"""What a model answers, by transformers: no server of ours has a part in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import make_tiny_checkpoint


def answered(checkpoint: Path, prompt: str, max_tokens: int) -> list[int]:
    """The tokens that a checkpoint's model answers a prompt with, greedily."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(checkpoint)(prompt).input_ids
    return generated(model_of(checkpoint), ids, max_tokens)


def model_of(checkpoint: Path) -> Any:
    """The model of a checkpoint, as CPU servers have it."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def generated(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens that follow a prompt, greedily."""
    import torch

    options = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": None}
    found = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
    return list(found[0, len(prompt) :].tolist())


MODULES = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
TOKENS = 12
PROMPTS = [[300, 401, 302], [333 + i % 150 for i in range(300)]]  # the second fills KV blocks


class Reference:
    """Tokens that a model with an adapter merged into it gives in transformers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed, name in enumerate(("a", "b"), start=1):
            make_tiny_checkpoint(root / name, seed=seed)
        for seed in (1, 2, 3):
            self._make_adapter(f"x{seed}", seed)
        self._make_adapter("rank32", 4, rank=32)

    def _make_adapter(self, name: str, seed: int, rank: int = 8) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        weights = load_file(self.root / "a" / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        names = [f"model.layers.{layer}.{one}" for layer in (0, 1) for one in MODULES]
        tensors = {}
        for module in [*names, "lm_head"]:
            rows, columns = weights[f"{module}.weight"].shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                values = torch.randn(shape, generator=generator) * 0.15
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
        directory = self.root / name
        directory.mkdir()
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": "all-linear"}
        config["base_model_name_or_path"] = str(self.root / "a")
        (directory / "adapter_config.json").write_text(json.dumps(config))

    def tensors(self, adapter: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        found: dict[str, Any] = load_file(self.root / adapter / "adapter_model.safetensors")
        return found

    def tokens(self, model: str, adapter: str | None = None) -> list[list[int]]:
        found = model_of(self.root / model)
        weights, tensors = found.state_dict(), self.tensors(adapter) if adapter else {}
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] += (16 / tensors[name].shape[0]) * up @ tensors[name]
        found.load_state_dict(weights)
        return [generated(found, prompt, TOKENS) for prompt in PROMPTS]
