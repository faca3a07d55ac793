"""Arguments of the fleet file as command lines of vLLM and its router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# The router's argparse takes one value per occurrence of these (action="append").
_ONE_VALUE_PER_FLAG = frozenset(
    {
        "kv-event-source",
        "kv-event-replay-source",
        "pd-kv-events",
        "prefill",
        "decode",
        "wasm-middleware-route",
    }
)

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes


def server_flags(arguments: Mapping[str, Any]) -> list[str]:
    """vLLM's command line: true → `--x`, false → `--no-x`, null → nothing, mapping → JSON."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is False:
            flags.append(f"--no-{name}")
        else:
            flags.extend(_flag(name, value))
    return flags


def lora_flags(adapters: int, rank: int) -> list[str]:
    """What lets a server take that many adapters of that rank while it runs.

    Requests of a version and of the one before it are under way together after a change, so that
    twice as many are kept in host memory.
    """
    allowed = next((one for one in _RANKS if one >= rank), rank)
    limits = {
        "enable-lora": True,
        "max-loras": adapters,
        "max-cpu-loras": 2 * adapters,
        "max-lora-rank": allowed,
    }
    return server_flags(limits)


def router_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The router's command line: as vLLM's, but false is nothing, for it knows no `--no-x`."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        if isinstance(value, list) and name in _ONE_VALUE_PER_FLAG:
            for item in value:
                flags.extend(_flag(name, item))
        else:
            flags.extend(_flag(name, value))
    return flags


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(_text(item) for item in value)]
    text = _text(value)
    if text.startswith("-"):
        # argparse would take a separate value with a leading dash for another option
        return [f"--{name}={text}"]
    return [f"--{name}", text]


def _text(value: Any) -> str:
    if isinstance(value, dict | bool):
        return json.dumps(value, separators=(",", ":"))
    return str(value)
