"""What the NCCL of servers must be, and their sender's with it.

NCCL takes its settings from environment variables of each process and never reconciles them across
ranks: a group whose members differ in the protocol or the number of channels hangs in its first
broadcast. Servers get them from the fleet file's `env:`, and from vLLM, which sets a dozen where
VLLM_BATCH_INVARIANT is on. The sender takes over what the servers have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from skyctl.errors import PreflightError
from skyctl.push.server_facts import ServerFacts

_NAME = re.compile("NCCL_[A-Z0-9_]+")
_OWN = ("NCCL_DEBUG", "NCCL_NO_CACHE", "NCCL_LAUNCH_MODE")
"""Beginnings of what each process may have as it likes."""
_FILES = ("PLUGIN", "FILE", "DUMP", "PATH")
"""Parts of the names of what makes NCCL load or write a file: a server that somebody else started
does not get to choose that for our sender."""

_FEW_CHANNELS = 8
"""Below this NVLink is far from used up; NCCL takes 16 and more by itself."""


def refuse_without_nccl(facts: Sequence[ServerFacts]) -> None:
    """Without NCCL, vLLM would report success and hold garbage.

    Raises:
        PreflightError: a server's vLLM cannot use NCCL.
    """
    for fact in facts:
        if fact.nccl_problem:
            raise PreflightError(
                f"{fact.name}: {fact.nccl_problem}",
                hint="install the nvidia-nccl package that its vLLM asks for, or set "
                "VLLM_NCCL_SO_PATH in its `env:`",
            )


def common_settings(facts: Sequence[ServerFacts]) -> dict[str, str] | None:
    """The variables that all servers share; None where no server tells.

    Raises:
        PreflightError: servers differ, so that their group would hang.
    """
    told = [(f.name, shared(f.nccl_settings)) for f in facts if f.nccl_settings is not None]
    if not told:
        return None
    (first, settings), *others = told
    for name, theirs in others:
        if theirs != settings:
            variable = min(dict(theirs.items() ^ settings.items()))
            raise PreflightError(
                f"{first} and {name} differ in {variable} ({_shown(settings, variable)}, "
                f"{_shown(theirs, variable)}): their NCCL group would hang",
                hint="give all servers the same NCCL settings in their `env:`, and "
                "VLLM_BATCH_INVARIANT to all or none",
            )
    return settings


def pace_notes(settings: Mapping[str, str]) -> list[str]:
    """What makes a broadcast slow, in words."""
    channels = settings.get("NCCL_MAX_NCHANNELS", "")
    if channels.isdigit() and int(channels) < _FEW_CHANNELS:
        return [
            f"servers hold NCCL to {channels} channel{'s' if channels != '1' else ''} "
            "(NCCL_MAX_NCHANNELS; VLLM_BATCH_INVARIANT sets it): the push goes at that pace"
        ]
    return []


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


def _shown(settings: Mapping[str, str], variable: str) -> str:
    return settings.get(variable) or "not set"
