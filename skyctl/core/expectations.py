"""Between a fleet's state and its pushes: the digests that weights must come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyctl.push.request import PushFleet
from skyctl.store.state import FleetState


def informed(fleet: PushFleet, state: FleetState) -> PushFleet:
    """`fleet` with what is on record of its servers' weights, and of what was pushed before."""
    rows = {row.name: row for row in state.servers()}
    launches = state.expected.launches()
    servers = []
    for server in fleet.servers:
        row = rows.get(server.name)
        pushed_to = row is not None and row.weight_version is not None
        servers.append(
            replace(
                server,
                weights_digest=(row and row.weights_digest) or "",
                launched_with="" if pushed_to else launches.get(server.name, ""),
            )
        )
    return replace(fleet, servers=tuple(servers), expected=state.expected.known())


def remember(state: FleetState, outcome: Mapping[str, Any]) -> None:
    """Keep what a push learned; `outcome` is its result's JSON, or its error's details."""
    if learned := outcome.get("learned"):
        state.expected.learn(learned)
