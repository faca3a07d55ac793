"""What a launcher is to skyctl: where a fleet's processes run, and how they are started and ended.

Nothing outside `launch/` spawns, watches or ends a server or a router. docs/adding.md explains how
to add a launcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from skyctl.store.identity import ProcessIdentity
    from skyctl.store.paths import FleetPaths


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is nvidia-smi's (PCI bus order); `memory_bytes` its total memory."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Cpu:
    """A logical CPU this process may run on. CPUs of equal `core` are hardware threads of one
    physical core.
    """

    id: int
    core: int


ADDRESS_AT_SPAWN = "(address at its start)"
PORT_AT_SPAWN = "(port at its start)"
"""Placeholders in a plan's command line if the node is chosen when the server is started."""


LEASE_VARIABLE = "SKYCTL_LEASE"
"""Names the file that a server's guard (`engines/inside/guard.py`) touches on each request."""


A_GPU = "a GPU of the Ray cluster"
"""The `target` of a node that Ray chooses for a process which needs one GPU."""


@dataclass(frozen=True)
class RayCluster:
    """The Ray cluster that chooses a server's node."""

    address: str
    """The head's HOST:PORT; auto is the cluster of this machine."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that a node must have."""
    head: bool = False
    """Whether the head's node may be chosen."""
    spread: bool = True
    """Whether nodes with few servers are preferred, instead of those with many."""
    allow_unauthenticated: bool = False
    """Whether a cluster that requires no token is accepted."""
    resource: str = "CPU"
    """The resource that a server takes: GPU or CPU."""
    count: int = 1
    """How much of the resource a node must have free."""


@dataclass(frozen=True)
class Node:
    """Another machine that servers run on, reached by ssh or through Ray."""

    target: str
    """What ssh is given (`user@host`); with `ray`, the node's address in the cluster, or what
    stands for the cluster before Ray has chosen a node."""
    address: str
    """What servers bind there."""
    python: str
    """Its interpreter, which has skyctl and the engine."""
    command: tuple[str, ...]
    """The client that reaches it."""
    grace_s: float
    """A server there ends itself this many seconds after it last heard of us."""
    ray: RayCluster | None = None
    """The cluster that takes the place of ssh, None for ssh."""

    @property
    def chosen(self) -> bool:
        """False for a node that is chosen when a server is started."""
        return self.address != ADDRESS_AT_SPAWN

    @property
    def cluster(self) -> Node:
        """What chose it and can be asked about it: the cluster, or itself if it was not chosen."""
        if self.ray is None:
            return self
        return replace(self, target="the Ray cluster", address=ADDRESS_AT_SPAWN)

    @property
    def with_a_gpu(self) -> Node:
        """Any node of its Ray cluster that has a GPU free, for one process."""
        return replace(self.cluster, target=A_GPU)


@dataclass(frozen=True)
class Follower:
    """A part of a server that runs on another machine than the part which answers (the leader). It
    needs no secret. `gpus` are those of its node."""

    node: Node
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChosenPlace:
    """Where a server was started, if its node was chosen only then."""

    node: Node
    port: int
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """What one machine has for servers."""

    node: Node | None
    """The machine, None for this one."""
    gpus: tuple[Gpu, ...]
    """The GPUs that servers may use."""
    cpus: tuple[Cpu, ...]
    """Its CPUs."""
    next_port: Callable[[], int]
    """A free port at its address."""
    interface: str = ""
    """The network interface of that address, "" if unknown."""


class ChildProcess(Protocol):
    """A process and everything below it. Belongs to the running loop.

    `exited` is set when the leader is gone. `identity` is None for a spawn that was intended but
    never recorded: then only `token`, which is in the environment of all its processes, finds them.
    `descendants` are those that `record_descendants` saw.
    """

    identity: ProcessIdentity | None
    token: str
    descendants: tuple[ProcessIdentity, ...]
    exited: asyncio.Event

    @property
    def pid(self) -> int | None: ...

    def alive(self) -> bool:
        """Whether the leader runs."""

    def exit_text(self) -> str:
        """How the leader ended: `exited with code 1`, `was killed by SIGKILL`."""

    def record_descendants(self) -> bool:
        """Record the processes that live below the leader now; True if a new one was seen."""

    def record_segments(self) -> None:
        """Record the shared memory that it would leave behind."""

    def place(self) -> ChosenPlace | None:
        """Where it runs, if that was chosen at its spawn; None before, and for all others."""

    def connection_lost(self) -> str:
        """Why its machine cannot be asked just now, whatever the server itself answers; or ""."""

    def listens_at(self, port: int) -> bool:
        """False if another process answers there; True if unknown."""

    def members(self) -> Sequence[Any]:
        """Every live process of the tree; each has a `pid`."""

    def resident_bytes(self) -> int | None:
        """Memory of the tree; None if unknown."""

    async def lost(self) -> str:
        """Why it is unknown whether it still runs; "" while it is known."""

    async def settled(self) -> None:
        """Return once it sees the current versions of the files that it reads from this machine."""

    async def stop(self, timeout_s: float) -> bool:
        """End the whole tree: gently, after `timeout_s` seconds by force. False if force was
        needed.

        Raises:
            SkyctlError: a process survived even that.
            HostUnreachable: it is unknown what became of it.
        """


@dataclass(frozen=True)
class Host:
    """Where a fleet's processes run. `HOSTS` (`skyctl/launch/__init__.py`) has all."""

    name: str
    """The launcher's name in fleet files."""
    gpus: Callable[[], Sequence[Gpu]]
    """Its GPUs."""
    cpus: Callable[[], Sequence[Cpu]]
    """Its CPUs."""
    free_port: Callable[[str], int]
    """A free port at an address, never the same one twice."""
    port_holder: Callable[[str, int], str | None]
    """Who listens at an address and port, in readable form; None if it is free."""
    bind_error: Callable[[str, int], str | None]
    """Why no process of ours could listen there, even if the port were free; None if one can."""
    spawn: Callable[[Sequence[str], Mapping[str, str], Path, str], ChildProcess]
    """Start a command with variables that are added to its environment (`token` too, as
    SKYCTL_TOKEN), and append its output to a log on this machine. Raises SkyctlError if the program
    cannot be started."""
    adopt: Callable[[ProcessIdentity | None, str, Sequence[ProcessIdentity]], ChildProcess]
    """Take over what an earlier supervisor spawned."""
    environment: Callable[[FleetPaths], dict[str, str]]
    """Variables that keep a process's temporary files in the fleet's directory."""
    sweep: Callable[[FleetPaths], None]
    """Remove those files once no process is left."""
    on: Callable[[Node, Sequence[Follower]], Host] | None = None
    """The same on another machine, with the followers of what is spawned on theirs; None for a
    launcher limited to this one."""
    reap: Callable[[], None] = lambda: None
    """Wait for its own helpers that have ended: a supervisor adopts what its children leave."""
