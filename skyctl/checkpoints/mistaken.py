"""Recognise directories that are not Hugging Face checkpoints, and say what to pass instead."""

from __future__ import annotations

import json
from pathlib import Path

# torch.distributed.checkpoint, Megatron, DeepSpeed
_OF_TRAINERS = ("*.distcp", "*/*.distcp", "latest_checkpointed_iteration.txt", "global_step*")
_NO_CHECKPOINT = "give a Hugging Face directory: config.json and *.safetensors"


def mistaken_for(directory: Path) -> tuple[str, str]:
    """What a directory without config.json or without safetensors is, and a hint."""

    def has(*patterns: str) -> bool:
        return any(next(directory.glob(pattern), None) is not None for pattern in patterns)

    if has("adapter_config.json", "adapter_model.*"):
        return (
            f"{directory} is a PEFT adapter (LoRA){_of(directory)}, not a checkpoint of the whole "
            "model",
            "merge it into its model (peft: merge_and_unload) and give what that saves",
        )
    if has("snapshots/*/config.json"):
        revision = max(directory.glob("snapshots/*/config.json"), key=_age).parent
        return f"{directory} is a hub cache entry", f"give its snapshot: {revision}"
    if configs := sorted(directory.glob("*/config.json"), key=_age):
        return (
            f"{directory} is not a checkpoint: it has no config.json",
            f"there is a checkpoint in it: {configs[-1].parent}",
        )
    if not has("*.safetensors") and has("*.gguf"):
        return (
            f"{directory} holds GGUF files, which are quantized for llama.cpp",
            "give the model they were made of, as safetensors",
        )
    if has("original/*", "consolidated.*", "params.json") and not has("model*.safetensors"):
        return (
            f"{directory} holds a model in its maker's own format (original/, consolidated.*)",
            "download the *.safetensors of that repository as well, or convert it",
        )
    if has(*_OF_TRAINERS):
        return (
            f"{directory} is a trainer's sharded checkpoint, not a Hugging Face one",
            "save or convert it with save_pretrained (safetensors), and give that directory",
        )
    if has("*.bin", "*.pt", "*.pth"):
        return (
            f"checkpoint {directory} has no *.safetensors file: its weights are pickled",
            "save it again with safe_serialization=True",
        )
    if has(".gitattributes", ".git", "README.md") and not has("*.safetensors"):
        return (
            f"{directory} is a hub repository without its weights: it has no *.safetensors file",
            "download it completely: hf download OWNER/NAME --local-dir DIRECTORY",
        )
    missing = "config.json" if not has("config.json") else "*.safetensors file"
    return f"{directory} is not a checkpoint: it has no {missing}", _NO_CHECKPOINT


def _of(adapter: Path) -> str:
    """` of Qwen/Qwen3-0.6B`, if the adapter says so."""
    try:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        base = config["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" of {base}" if isinstance(base, str) and base else ""


def _age(path: Path) -> float:
    return path.stat().st_mtime
