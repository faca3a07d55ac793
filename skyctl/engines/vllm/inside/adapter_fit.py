"""Which modules of a LoRA adapter this worker applies: vLLM leaves out others without an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

_SCALES = ("use_rslora", "rank_pattern", "alpha_pattern")


def unapplied(model: Any, names: Sequence[str]) -> list[str]:
    """Those of an adapter's tensors (names as PEFT saves them) that reach no layer."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = getattr(model, "lora_manager", None)
    if manager is None:
        return []  # loading an adapter says so
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    taken = set(_taken(manager))

    def is_applied(name: str) -> bool:
        try:
            return parse_fine_tuned_lora_name(name, mapper)[0] in taken
        except ValueError:  # a name that vLLM does not know
            return False

    return [name for name in names if not is_applied(name)]


def _taken(manager: Any) -> Iterator[str]:
    """Names of modules that an adapter can have: parts of fused layers, and all others."""
    for name in manager.modules:
        yield from manager.packed_modules.get(name, (name,))
        if getattr(manager, "_is_3d_moe_model", False) and name.endswith(".experts"):
            yield f"{name}.base_layer"


def unread(config: Mapping[str, Any]) -> list[str]:
    """Keys of an adapter's configuration that scale it, and that this vLLM does not read."""
    from vllm.lora.peft_helper import PEFTHelper

    readable = {field.name for field in fields(PEFTHelper)}
    return [key for key in _SCALES if config.get(key) and key not in readable]
