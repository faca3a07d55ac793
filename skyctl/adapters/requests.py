"""The changes of a fleet's adapters that can be requested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SentTensors:
    """What a process that has an adapter's tensors in memory tells of them."""

    numbers: tuple[int, ...]
    """The digest of each tensor (`wire/device_digest.py`), in the order of the file's header."""
    export: tuple[Any, ...] = ()
    """The `Export` of GPU memory in which they lie as in the file; empty if the file has them."""
    is_zero: bool = False
    """Whether one side of each module is zero."""


@dataclass(frozen=True, kw_only=True)
class LoadAdapter:
    """Serve a PEFT directory under a name."""

    name: str
    """The model name that requests select it by."""
    directory: str
    """What PEFT's save_pretrained wrote."""
    new: bool | None = True
    """Whether the name must be free (True), already served (False), or either (None)."""
    any_base: bool = False
    """Accept an adapter that names another base model."""
    sent: SentTensors | None = None
    """The tensors, if they come out of a process's memory: servers are given them first."""
    timeout_s: float | None = None
    """For each call to a server; None takes the fleet's."""


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter:
    """Stop serving this name."""

    name: str
    timeout_s: float | None = None
