"""How this process prints: chosen at the entry point, before `output.py` and Rich are imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Mode:
    """`color` False: no colours, not even on a terminal."""

    command: str = "skyctl"
    json: bool = False
    quiet: bool = False
    color: bool = True


mode = Mode()
on_mode_change: list[Callable[[], None]] = []
"""Called after each change of the mode."""


def discard_stdout() -> None:
    """Discard stdout's buffer, which would fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def configure(*, command: str, json: bool, quiet: bool = False, color: bool = True) -> None:
    """Set the mode of all further output, to the current stdout and stderr."""
    mode.command, mode.json, mode.quiet, mode.color = command, json, quiet, color
    for callback in on_mode_change:
        callback()
