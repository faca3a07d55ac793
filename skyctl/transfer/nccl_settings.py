"""What the NCCL of servers must be, and their sender's with it.

NCCL takes its settings from environment variables of each process and never reconciles them across
ranks: a group whose members differ in the protocol or the number of channels hangs in its first
broadcast. Servers get them from the fleet file's `env:`, and from vLLM, which sets a dozen where
VLLM_BATCH_INVARIANT is on. The sender takes over what the servers have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile("NCCL_[A-Z0-9_]+")
_OWN = ("NCCL_DEBUG", "NCCL_NO_CACHE", "NCCL_LAUNCH_MODE")
"""Beginnings of what each process may have as it likes."""
_FILES = ("PLUGIN", "FILE", "DUMP", "PATH")
"""Parts of the names of what makes NCCL load or write a file: a server that somebody else started
does not get to choose that for our sender."""


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an environment, what all ranks of a group must have in common; no files."""
    return {
        name: value
        for name, value in environment.items()
        if _NAME.fullmatch(name)
        and value.isprintable()
        and not name.startswith(_OWN)
        and not any(part in name for part in _FILES)
        and "/" not in value
    }


def applied(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """An environment with these settings and no others."""
    own = shared(environment)  # what makes it load files stays as it is
    return {name: value for name, value in environment.items() if name not in own} | dict(settings)
