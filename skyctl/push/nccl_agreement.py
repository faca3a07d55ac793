"""Whether servers have NCCL, and agree on its settings (see `transfer/nccl_settings.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyctl.errors import PreflightError
from skyctl.launch.base import Node
from skyctl.push.request import PushServer
from skyctl.push.server_facts import ServerFacts
from skyctl.transfer.nccl_settings import shared

_FEW_CHANNELS = 8
"""With fewer channels NVLink is far from saturated; NCCL's own choice is 16 and more."""


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


def refuse_shared_gpus(servers: Sequence[PushServer]) -> None:
    """NCCL takes one process on each GPU of a group.

    Raises:
        PreflightError: two servers share a GPU.
    """
    by_gpu: dict[tuple[Node | None, int], str] = {}
    for server in servers:
        for gpu in server.gpus:
            which = server.node, gpu
            if (other := by_gpu.setdefault(which, server.target.name)) != server.target.name:
                raise PreflightError(
                    f"{other} and {server.target.name} share GPU {gpu}, and NCCL takes one process "
                    "on each GPU",
                    hint="use `weight_transfer: {transport: ipc}` in the fleet file",
                )


def common_settings(facts: Sequence[ServerFacts]) -> dict[str, str] | None:
    """The variables that all servers share; None if no server reports them.

    Raises:
        PreflightError: servers differ, so their group would hang.
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
    """Settings that make a broadcast slow, in words."""
    channels = settings.get("NCCL_MAX_NCHANNELS", "")
    if channels.isdigit() and int(channels) < _FEW_CHANNELS:
        return [
            f"servers hold NCCL to {channels} channel{'s' if channels != '1' else ''} "
            "(NCCL_MAX_NCHANNELS; VLLM_BATCH_INVARIANT sets it): the push goes at that pace"
        ]
    return []


def _shown(settings: Mapping[str, str], variable: str) -> str:
    return settings.get(variable) or "not set"
