"""One module per transport: the parent's half shapes payloads, the sender's half moves bytes.

Here is chosen which of them carries a push, and why; a wish the servers cannot fulfil is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import cast
from urllib.parse import urlsplit

from skyctl.errors import PreflightError
from skyctl.transfer.transports.base import Transport

BACKENDS = {"shm": "skyctl", "gloo": "skyctl", "nccl": "nccl", "ipc": "ipc"}
"""Weight-transfer backend that servers need, by transport. `disk` needs none."""


@dataclass(frozen=True)
class Reachable:
    """What the choice looks at in a server."""

    name: str
    url: str
    backend: str


@dataclass(frozen=True)
class Choice:
    """A transport's name and the reason for it, as the operator reads it."""

    name: str
    reason: str


BESIDE = ("shm", "ipc")
"""Transports whose sender must be on the servers' machine, and can be on each of several."""
ACROSS = ("gloo", "nccl")
"""Those of which one sender reaches servers on several, if a launcher has put them there."""


def choose(
    requested: str, configured: str, servers: Sequence[Reachable], *, nodes: int = 0
) -> Choice:
    """Settle the transport.

    Args:
        requested: what the command line says, "auto" when nothing.
        configured: what the fleet file says.
        servers: all servers of the push.
        nodes: how many machines a launcher has put them on; 0 where it was none.

    Raises:
        PreflightError: the servers were not started for it; says what to change.
    """
    if requested != "auto":
        choice = Choice(requested, "asked for")
    elif configured != "auto":
        choice = Choice(configured, "set in the fleet file")
    else:
        choice = _automatic(servers)
    if choice.name == "disk":
        return choice
    if choice.name not in BACKENDS:
        raise PreflightError(f"there is no transport {choice.name!r}")
    if not (nodes and choice.name in (*BESIDE, *ACROSS)):
        _check_local(choice.name, servers)
    _check_backends(choice.name, servers)
    if not nodes:
        return choice
    which = "a sender on each machine" if choice.name in BESIDE else "one sender for all machines"
    return Choice(choice.name, f"{choice.reason}; {which}: {nodes}")


def _automatic(servers: Sequence[Reachable]) -> Choice:
    backends = {server.backend for server in servers}
    if backends == {"skyctl"}:
        return Choice("shm", "the servers run on this machine's CPUs")
    if backends == {"ipc"}:
        return Choice("ipc", "the sender shares the servers' GPUs")
    if backends == {"nccl"}:
        return Choice("nccl", "a GPU is free for the sender")
    if backends == {""}:
        return Choice("disk", "the servers were started without a weight-transfer backend")
    if backends.isdisjoint(BACKENDS.values()):
        return Choice("disk", "the servers' backend is for a trainer's own sender")
    mixed = ", ".join(f"{server.name}: {server.backend or 'none'}" for server in servers)
    raise PreflightError(
        f"the servers have different weight-transfer backends ({mixed})",
        hint="push with --transport disk, or start all of them with one",
    )


def _check_backends(transport: str, servers: Sequence[Reachable]) -> None:
    backend = BACKENDS[transport]
    wrong = [server for server in servers if server.backend != backend]
    if not wrong:
        return
    has = wrong[0].backend or "none"
    raise PreflightError(
        f"transport {transport} needs servers started with the weight-transfer backend "
        f"{backend!r}; {wrong[0].name} has {has}",
        hint=f"set `weight_transfer: {{transport: {transport}}}` in the fleet file and restart the "
        "servers, or push with --transport disk",
    )


def _check_local(transport: str, servers: Sequence[Reachable]) -> None:
    from skyctl.fleetfile.values import is_loopback

    for server in servers:
        if not is_loopback(urlsplit(server.url).hostname or ""):
            if transport in ACROSS:
                raise PreflightError(
                    f"transport {transport} reaches other machines through a launcher only; "
                    f"{server.name} is at {server.url}",
                    hint="push with --transport disk from a shared file system",
                )
            raise PreflightError(
                f"transport {transport} works on one machine; {server.name} is at {server.url}",
                hint="run skyctl there, or push with --transport disk from a shared file system",
            )


def load_transport(name: str) -> Transport:
    """The parent's half of a transport that moves chunks.

    Raises:
        PreflightError: this installation has no sender for it.
    """
    module = f"skyctl.transfer.transports.{name}"
    if find_spec(module) is None:
        raise PreflightError(
            f"transport {name} needs a GPU sender, which this installation does not have",
            hint="install skyctl-fleet[gpu], or push with --transport disk",
        )
    return cast(Transport, import_module(module).TRANSPORT)
