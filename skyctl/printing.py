"""How this process prints: set at the entry point, before `output.py` and Rich are imported."""

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
heard: list[Callable[[], None]] = []
"""Called when the mode changes."""


def let_stdout_go() -> None:
    """What is left in its buffer must not fail once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def configure(*, command: str, json: bool, quiet: bool = False, color: bool = True) -> None:
    """Set the mode of all further output, to the current stdout and stderr."""
    mode.command, mode.json, mode.quiet, mode.color = command, json, quiet, color
    for hear in heard:
        hear()
