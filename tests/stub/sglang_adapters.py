"""The stub's LoRA adapters: SGLang's registry in the front end, its adapters in the scheduler.

Read in SGLang 0.5.14 to 0.5.23 (`lora/lora_registry.py`, `lora/lora_manager.py`,
`tokenizer_control_mixin.py`, `entrypoints/openai/serving_base.py`), without skyctl's keeper.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyctl.checkpoints.header import read_header

_STACKED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


@dataclass(frozen=True)
class LoRARef:
    """What SGLang calls one; its id is unlike any other's."""

    lora_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    lora_name: str | None = None
    lora_path: str | None = None
    pinned: bool | None = None


@dataclass(frozen=True)
class InScheduler:
    """An adapter as the scheduler has it: under the name that it was loaded by, in host memory."""

    name: str
    digest: str
    fatal: str
    """What ends the scheduler at the first request with it."""


class AdapterFrontEnd:
    """A front end that takes adapters for the modules `targets`; none where that is None."""

    def init_adapters(self, targets: Sequence[str] | None) -> None:
        self.targets = targets
        self.lora_registry = SimpleNamespace(_registry={}, _counters=Counter())
        self.lora_ref_cache: dict[str, LoRARef] = {}
        self.lora_update_lock = asyncio.Lock()
        self.rid_to_state: dict[str, Any] = {}
        self.adapters: dict[str, InScheduler] = {}

    async def load_adapter(self, name: str, path: str) -> str:
        """`/load_lora_adapter`: why it failed; "" when it did not."""
        if self.targets is None:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        async with self.lora_update_lock:
            adapter = LoRARef(lora_name=name, lora_path=path, pinned=False)
            if any(one.name == name for one in self.adapters.values()):
                return f"Failed to load LoRA adapter {name} because it is already loaded"
            try:
                self.adapters[adapter.lora_id] = self._read(name, Path(path))
            except (OSError, KeyError, ValueError) as error:
                return str(error)
            self.lora_registry._registry[name] = adapter
            self.lora_ref_cache[name] = adapter
        return ""

    async def unload_adapter(self, name: str) -> str:
        """`/unload_lora_adapter`: it waits for requests, and loads wait for it."""
        if self.targets is None:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        async with self.lora_update_lock:
            adapter = self.lora_registry._registry.pop(name, None)
            if adapter is None:
                return f"LoRA with name {name} does not exist."
            await self._until(lambda: not self.lora_registry._counters[adapter.lora_id])
            del self.adapters[adapter.lora_id]
        return ""

    async def update_lora_adapter_communicator(self, request: Any) -> list[Any]:
        """A message to the scheduler that drops an adapter, by its id."""
        assert self.lora_update_lock.locked()
        del self.adapters[request.lora_id]
        return [SimpleNamespace(success=True, error_message="")]

    async def acquire(self, name: str) -> str:
        """The id of a name from now on. Raises ValueError: it was never loaded; one that was
        unloaded is loaded again.
        """
        if self.targets is None:
            raise ValueError(f"LoRA adapter '{name}' was requested, but LoRA is not enabled.")
        if name not in self.lora_registry._registry:
            if name not in self.lora_ref_cache:
                raise ValueError(f"Got LoRA adapter that has never been loaded: {name}")
            await self.load_adapter(name, str(self.lora_ref_cache[name].lora_path))
        adapter: LoRARef = self.lora_registry._registry[name]
        self.lora_registry._counters[adapter.lora_id] += 1
        return adapter.lora_id

    async def _until(self, condition: Callable[[], bool]) -> None:
        raise NotImplementedError

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models lists behind the model itself."""
        return [
            {"id": one.lora_name, "root": one.lora_path, "parent": "stub", "max_model_len": None}
            for one in self.lora_registry._registry.values()
        ]

    def _read(self, name: str, directory: Path) -> InScheduler:
        config = json.loads((directory / "adapter_config.json").read_text())
        file = directory / "adapter_model.safetensors"
        modules = [tensor.name.split(".")[-3] for tensor in read_header(file)[1]]
        listed = {_STACKED.get(module, module) for module in config["target_modules"]}
        taken = {_STACKED.get(target, target) for target in self.targets or ()}
        if config["r"] > 16 or not listed <= taken:
            raise ValueError(f"LoRA adapter {name} with rank {config['r']} is incompatible")
        if "q_proj" in modules and "v_proj" not in modules:
            raise KeyError("v_proj")
        names = set(modules)
        if "q_proj" in names:
            names -= {"q_proj", "k_proj", "v_proj"}
        if "gate_proj" in names:
            names -= {"gate_proj", "up_proj"}
        alone = sorted(names - taken)
        fatal = f"Cannot find target module name for {alone[0]}" if alone else ""
        return InScheduler(name, hashlib.sha256(file.read_bytes()).hexdigest(), fatal)


class OpenAIServingBase:
    """By what a request's `model` and `lora_path` choose an adapter."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self.tokenizer_manager = tokenizer_manager

    def _resolve_lora_path(self, request_model: str, explicit_lora_path: Any) -> Any:
        _, _, adapter = request_model.partition(":")
        return adapter.strip() or explicit_lora_path
