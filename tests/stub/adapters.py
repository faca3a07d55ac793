"""The stub's LoRA adapters: vLLM's routes, and what skyctl's plug-in adds to them.

What they answer was seen on vLLM 0.32 and is checked by tests/integration/test_adapters.py.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMED = "skyctl:"


@dataclass(frozen=True)
class Loaded:
    """What vLLM calls a LoRARequest: its own name, its path, and the weights as they were read."""

    name: str
    path: str
    digest: str


class AdapterRefused(Exception):
    """The status and the text that vLLM would answer with."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class StubAdapters:
    """`served` maps the names that requests may ask for; `running` counts requests under way."""

    base: str = "stub"
    enabled: bool = True
    plugin: bool = True
    max_rank: int = 16
    served: dict[str, Loaded] = field(default_factory=dict)
    running: Counter[Loaded] = field(default_factory=Counter)
    given: dict[str, bytes] = field(default_factory=dict)
    """What its worker was given out of another process's memory, by path."""
    cannot_take: str = ""
    """Why its worker takes none."""

    def rpc(self, method: str, kwargs: dict[str, Any]) -> Any:
        """What the worker extension does with memory; `source` is a file and an offset."""
        path = kwargs.get("path", "")
        match method:
            case "skyctl_adapter_take" if self.cannot_take:
                return self.cannot_take
            case "skyctl_adapter_take":
                file, offset = kwargs["source"]
                kept = {key: self.given[key] for key in kwargs["needed"] if key in self.given}
                self.given = {**kept, path: Path(file).read_bytes()[offset:]}
                return ""
            case "skyctl_adapter_write" if path not in self.given:
                return "absent"
            case "skyctl_adapter_write":
                with Path(kwargs["file"]).open("r+b") as file:
                    file.seek(kwargs["offset"])
                    file.write(self.given[path])
                return "written"
            case "skyctl_adapter_release":
                self.given = {k: v for k, v in self.given.items() if k not in kwargs["paths"]}
                return None
        raise LookupError(method)

    def load(self, body: dict[str, Any]) -> str:
        """POST /v1/load_lora_adapter."""
        name, path = body["lora_name"], body["lora_path"]
        if self.plugin and path.startswith(NAMED):
            return self._give(name, path.removeprefix(NAMED))
        if name == self.base:
            raise AdapterRefused(400, f"The lora adapter '{name}' conflicts with a served base")
        if name in self.served and not body.get("load_inplace"):
            raise AdapterRefused(
                400, f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )  # fmt: skip
        self.served[name] = Loaded(name, path, self._read(name, path))
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: dict[str, Any]) -> str:
        """POST /v1/unload_lora_adapter."""
        name = body["lora_name"]
        if name not in self.served:
            raise AdapterRefused(404, f"The lora adapter '{name}' cannot be found.")
        del self.served[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models lists behind the model itself."""
        found = [(name, one, "vllm") for name, one in self.served.items()]
        held = set(self.served.values())
        found += [(one.name, one, "in-flight") for one in +self.running if one not in held]
        return [
            {"id": name, "root": one.path, "parent": self.base, "owned_by": owner}
            for name, one, owner in found
        ]

    def _give(self, name: str, version: str) -> str:
        held = self.served.get(name)
        if held is None or held.name != version:
            if name == self.base or version not in self.served:
                raise AdapterRefused(
                    404, f"{name!r} cannot be a name of {version!r}, which is not loaded"
                )
            self.served[name] = self.served.pop(version)
        return f"Success: LoRA adapter '{name}' is {version}."

    def _read(self, name: str, path: str) -> str:
        directory = Path(path)
        try:
            config = json.loads((directory / "adapter_config.json").read_text())
            weights = self.given.get(path)
            if weights is None:
                file = (directory / "adapter_model.safetensors").read_bytes()
                weights = file[8 + int.from_bytes(file[:8], "little") :]
        except FileNotFoundError:
            raise AdapterRefused(
                404, f"Loading lora {name} failed: No adapter found for {path}"
            ) from None
        if config["r"] > self.max_rank:
            raise AdapterRefused(
                500, f"Call to add_lora method failed: Worker failed with error 'LoRA rank "
                f"{config['r']} is greater than max_lora_rank {self.max_rank}.'"
            )  # fmt: skip
        return hashlib.sha256(weights).hexdigest()
