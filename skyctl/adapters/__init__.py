"""LoRA adapters as versioned artifacts, loaded into running servers without a freeze."""

from skyctl.adapters.change import (
    AdapterChange,
    AdapterFleet,
    LoadAdapter,
    UnloadAdapter,
    catch_up,
    changing,
    enter,
    load,
    restore,
    retire,
    unload,
)
from skyctl.adapters.peft import check_fits, read_adapter, write_adapter

__all__ = [
    "AdapterChange",
    "AdapterFleet",
    "LoadAdapter",
    "UnloadAdapter",
    "catch_up",
    "changing",
    "check_fits",
    "enter",
    "load",
    "read_adapter",
    "restore",
    "retire",
    "unload",
    "write_adapter",
]
