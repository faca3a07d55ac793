"""Files beside a checkpoint's tensors that decide which tokens a request is, and where its answer
ends. Servers read them as they start, and a push does not carry them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.checkpoints.checkpoint import locate
from skyctl.checkpoints.header import read_json, read_plain

_TEMPLATE = "chat_template.jinja"
_TOKENIZER_KEYS = ("eos_token", "bos_token", "add_bos_token", "added_tokens_decoder")
_SAVED_STATE = ("padding", "truncation", "version")
"""Parts of tokenizer.json that say how it was last used."""
_GENERATION_META = ("transformers_version", "_from_model_config", "use_cache", "pad_token_id")


def chat_note(directory: Path, model_path: str | None) -> str:
    """One line about files that differ from those the servers were started with; "" if none do,
    if the checkpoint has none, or if the servers' are not here.
    """
    base = locate(model_path) if model_path else None
    if base is None or not base.is_dir():
        return ""
    ours, theirs = _read(directory), _read(base)
    changed = [
        name for name in ours if name in theirs and ours[name] and ours[name] != theirs[name]
    ]
    if not changed:
        return ""
    return (
        f"{' and '.join(changed)} differ from what the servers run, and a push carries tensors "
        "alone: clients get the servers' until they are restarted"
    )


def _read(directory: Path) -> dict[str, Any]:
    """What decides, by the words for it; {} and None for what a file does not say."""
    tokenizer = _mapping(directory / "tokenizer.json")
    settings = _mapping(directory / "tokenizer_config.json")
    generation = _mapping(directory / "generation_config.json")
    return {
        "the tokenizer": _without(tokenizer, _SAVED_STATE),
        "its special tokens": {key: settings[key] for key in _TOKENIZER_KEYS if key in settings},
        "eos_token_id of config.json": _mapping(directory / "config.json").get("eos_token_id"),
        "the chat template": _template(directory) or settings.get("chat_template"),
        "generation_config.json (stop tokens, sampling)": _without(generation, _GENERATION_META),
    }


def _mapping(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = read_json(path)
        return content if isinstance(content, dict) else {}
    return {}


def _without(mapping: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """What a mapping says, but for `keys`."""
    return {key: value for key, value in mapping.items() if key not in keys and value is not None}


def _template(directory: Path) -> str:
    with suppress(OSError, ValueError):
        return read_plain(directory / _TEMPLATE).decode("utf-8")
    return ""
