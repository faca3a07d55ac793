"""SGLang's request to drop an adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class UnloadLoRAAdapterReqInput:
    lora_name: str
    lora_id: str | None = None
