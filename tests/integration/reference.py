"""What a model answers, by transformers: no server of ours has a part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
