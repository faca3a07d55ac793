"""Bring servers to the adapters that are committed: as they start, and after a change that failed;
and remove the files of versions that nothing uses any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyctl import engines
from skyctl.adapters.applies import adapter_problem
from skyctl.adapters.fleet import AdapterFleet
from skyctl.adapters.given import release, unwritten
from skyctl.adapters.peft import UNWRITTEN, read_parts
from skyctl.checkpoints.staging import sweep
from skyctl.engines.base import Server
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import Outcome, fan_out
from skyctl.http.target import ServerTarget
from skyctl.kill_points import reached
from skyctl.store import adapters as store
from skyctl.store.adapters import AdapterVersion
from skyctl.store.state import FleetState

RETIRE_AFTER_S = 10.0
"""How long the files of a superseded version stay at least: a request that was accepted just before
the change may not be in the server's list yet.
"""


async def catch_up(
    state: FleetState, client: ControlClient, targets: Sequence[ServerTarget], timeout_s: float
) -> list[Outcome[None]]:
    """Bring servers to what is committed, and record each that got there; one outcome per server.

    The caller holds the adapters lock, or no other process can change adapters.
    """
    committed = store.served(state)
    ours = store.names(state)

    async def serve_committed(target: ServerTarget) -> None:
        await serve_exactly(engines.server(client, target, timeout_s=timeout_s), committed, ours)

    outcomes = await fan_out(targets, serve_committed, timeout_s=timeout_s * (1 + len(committed)))
    for outcome in outcomes:
        if outcome.ok:
            store.record_server(state, outcome.server, committed)
    return outcomes


async def serve_exactly(
    server: Server, committed: Mapping[str, AdapterVersion], ours: frozenset[str]
) -> None:
    """Make `server` serve the `committed` adapters and no other of `ours`.

    Raises:
        ServerError: it does not, or it is unknown whether it does.
    """
    if not committed and not ours:
        return
    loaded = await _loaded(server)
    stale, lacking = _differences(loaded, committed, ours)
    for name in stale:
        await server.unload_adapter(name)
    for version in lacking:
        if loaded.get(version.served_as) != version.path:
            if (Path(version.path) / UNWRITTEN).exists():
                raise ServerError(
                    f"{server.target.name}: {version.served_as} was only in the memory of servers, "
                    "and none that has it wrote it: sync it again"
                )
            adapter = await asyncio.to_thread(read_parts, version.path)
            if problem := await adapter_problem(server, *adapter):
                raise ServerError(f"{server.target.name}: {version.served_as}: {problem}")
            await server.load_adapter(version.served_as, version.path)
        await server.name_adapter(version.name, version.served_as)


async def _loaded(server: Server) -> dict[str, str]:
    """The directory of each adapter that a server serves, by name."""
    return {
        adapter.name: adapter.path for adapter in await server.adapters() if not adapter.in_flight
    }


def _differences(
    loaded: Mapping[str, str], committed: Mapping[str, AdapterVersion], ours: frozenset[str]
) -> tuple[list[str], list[AdapterVersion]]:
    """Names of `ours` that are to be unloaded, and committed versions that are not served under
    their names. Such a name is not unloaded: it moves to its version without a gap.
    """
    paths = {name: version.path for name, version in committed.items()}
    stale = []
    for name, path in loaded.items():
        base = name.rpartition("@")[0]
        if {name, base} & ours and name not in paths and path != paths.get(base):
            stale.append(name)
    lacking = [version for name, version in committed.items() if loaded.get(name) != version.path]
    return stale, lacking


async def behind(
    state: FleetState, client: ControlClient, targets: Sequence[ServerTarget], timeout_s: float
) -> set[str]:
    """The servers that answer and do not serve exactly what is committed; none while a
    change is under way.
    """
    committed, ours = store.served(state), store.names(state)
    if not ours or state.locks.taken(store.LOCK):
        return set()

    async def differs(target: ServerTarget) -> bool:
        loaded = await _loaded(engines.server(client, target, timeout_s=timeout_s))
        return any(_differences(loaded, committed, ours))

    outcomes = await fan_out(targets, differs, timeout_s=timeout_s)
    return {outcome.server for outcome in outcomes if outcome.value}


async def retire(fleet: AdapterFleet) -> None:
    """Remove the files of versions that no request uses any more, as far as servers can tell."""
    old = store.superseded(fleet.state, time.time() - RETIRE_AFTER_S)
    if old:
        targets, _ = fleet.targets()
        listings = (fleet.server(target).adapters() for target in targets)
        try:
            used = {
                adapter.path for listing in await asyncio.gather(*listings) for adapter in listing
            }
        except ServerError:
            return
        with fleet.state.transaction():
            for version in old:
                if version.path not in used:
                    store.forget_version(fleet.state, version)
    if fleet.directory.exists():
        await asyncio.to_thread(sweep, fleet.directory, store.kept_paths(fleet.state))


async def undo(
    fleet: AdapterFleet, name: str, targets: Sequence[ServerTarget]
) -> list[Outcome[None]]:
    """Bring servers back to what is committed; one that fails is quarantined."""
    reached("adapters.undo")
    outcomes = await catch_up(fleet.state, fleet.client, targets, fleet.timeout_s)
    for outcome in outcomes:
        if not outcome.ok:
            reason = f"its adapters are not the fleet's: {outcome.detail}; type: skyctl recover"
            fleet.state.update_server(outcome.server, quarantine=reason)
            fleet.quarantined(outcome.server)
    await withdraw(fleet, name, targets)
    return outcomes


async def withdraw(fleet: AdapterFleet, name: str, targets: Sequence[ServerTarget]) -> None:
    """After a change of `name` was undone: release what servers were given for it, unless they
    alone have it and requests may still use it.
    """
    path = store.withdraw(fleet.state, name)
    if path and path not in unwritten(fleet):
        await release(fleet, targets, [path])
