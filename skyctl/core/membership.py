"""Who receives requests: the pure rule from the replicas' states to the router's workers."""

from __future__ import annotations

from collections.abc import Mapping

# Frozen, but nothing is lost by queueing there: requests wait for the resume.
_FROZEN = ("paused", "updating")


def routable(states: Mapping[str, str]) -> set[str]:
    """Names of the servers to route to, from each server's state.

    While any server is ready, only ready ones. When the whole fleet is frozen, the frozen ones:
    their requests continue on resume. Asleep, quarantined and dead servers never.
    """
    ready = {name for name, state in states.items() if state == "ready"}
    return ready or {name for name, state in states.items() if state in _FROZEN}
