"""A fleet, as a change of its adapters needs to know it, and the result of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyctl import engines
from skyctl.engines.base import Server
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome
from skyctl.http.target import ServerTarget
from skyctl.store.adapters import AdapterVersion
from skyctl.store.server_locks import ServerLocks
from skyctl.store.state import FleetState


@dataclass(frozen=True)
class AdapterChange:
    """The result of a change."""

    name: str
    """The name that was changed."""
    adapter: AdapterVersion | None
    """The version that is served now; None after an unload."""
    before: int | None
    """The version that was served before; None if there was none."""
    outcomes: tuple[Outcome[None], ...]
    """One per server, those that did not take part included."""
    elapsed_ms: float
    """From the first request sent until the change was on record."""
    notes: tuple[str, ...] = ()
    """What could not be compared, and what looks odd."""


@dataclass(frozen=True)
class AdapterFleet:
    """A fleet, as a change of its adapters needs to know it."""

    name: str
    """The fleet's name, for messages."""
    state: FleetState
    """Where versions are recorded before and after they are loaded."""
    client: ControlClient
    """The connection pool for calls to servers."""
    targets: Callable[[], tuple[Sequence[ServerTarget], Mapping[str, str]]]
    """The servers that can take part now, and the reason of each other one; the others load what is
    committed before they are routed to.
    """
    directory: Path
    """Where the fleet's own copies of adapters are."""
    timeout_s: float
    """For each call to a server, and for the wait for the lock."""
    locks: ServerLocks | None = None
    """The locks of servers that other fleets list as well; None takes none."""
    in_memory: bool = True
    """Whether copies go to /dev/shm where they fit."""
    model: str | None = None
    """What the servers run, a directory or hub id; None if unknown."""
    bases: Sequence[str] = ()
    """All names of that model, the first as displayed."""
    reserved: Sequence[str] = ()
    """Names that requests select other models by."""
    max_rank: int | None = None
    """The largest rank the servers take; None leaves it to them."""
    max_adapters: int | None = None
    """How many adapters fit; None leaves it to the servers."""
    quarantined: Callable[[str], None] = lambda server: None
    """Called with the name of a server that was quarantined."""

    def server(self, target: ServerTarget, timeout_s: float | None = None) -> Server:
        """Its control routes."""
        return engines.server(self.client, target, timeout_s=timeout_s or self.timeout_s)
