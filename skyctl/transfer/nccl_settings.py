"""The NCCL settings that servers and their sender must share.

NCCL takes its settings from environment variables of each process and never reconciles them across
ranks: a group whose members differ in the protocol or the number of channels hangs in its first
broadcast. Servers get them from the fleet file's `env:`, and from vLLM, which sets a dozen if
VLLM_BATCH_INVARIANT is on. The sender adopts the servers' settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile("NCCL_[A-Z0-9_]+")
_OWN = ("NCCL_DEBUG", "NCCL_NO_CACHE", "NCCL_LAUNCH_MODE", "NCCL_HOSTID")
"""Prefixes of variables that may differ between processes."""
_FILES = ("PLUGIN", "FILE", "DUMP", "PATH")
"""Parts of the names of variables that make NCCL load or write a file: a server that another user
started must not choose files for our sender.
"""


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that all ranks of a group must share; no files."""
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
    """An environment with these settings in place of its own."""
    own = shared(environment)  # variables that name files stay as they are
    return {name: value for name, value in environment.items() if name not in own} | dict(settings)
