"""The changes of a fleet's adapters that can be requested."""

from __future__ import annotations

from dataclasses import dataclass


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
    timeout_s: float | None = None
    """For each call to a server; None takes the fleet's."""


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter:
    """Stop serving this name."""

    name: str
    timeout_s: float | None = None
