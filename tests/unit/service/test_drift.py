"""What counts as drift, rule by rule, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from skyctl.core.diagnosis import from_intent, from_routing, from_weights
from skyctl.core.status import FleetStatus, ReplicaStatus
from skyctl.service.drift import from_file
from skyctl.states import ReplicaState
from skyctl.store.state import ServerRow
from skyctl.supervisor.reconcile import Changes


def replica(name: str = "tiny-0", **fields: Any) -> ReplicaStatus:
    state = ReplicaState(fields.pop("state", "ready"))
    return ReplicaStatus(name, state, "http://h:1", **fields)


def status(*replicas: ReplicaStatus, version: str | None = None) -> FleetStatus:
    return FleetStatus("tiny", "healthy", replicas, None, weight_version=version)


def test_what_up_would_change_is_drift() -> None:
    changes = Changes(start=("a",), restart=("b",), stop=("c",), router=True, tinker=True)
    found = {drift.server: drift for drift in from_file(changes)}
    assert list(found) == ["a", "b", "c", "router", "tinker"]
    assert "does not run" in found["a"].detail
    assert "other settings" in found["b"].detail
    assert "not in the fleet file" in found["c"].detail
    assert all("skyctl up" in drift.hint for drift in found.values())
    assert from_file(Changes()) == from_file(None) == []


@pytest.mark.parametrize(
    ("row", "state", "hint"),
    [
        ({"paused": True}, "ready", "skyctl pause"),
        ({}, "paused", "skyctl resume"),
        ({"sleep_level": 1}, "ready", "skyctl sleep"),
        ({"sleep_level": 2}, "paused", "skyctl sleep"),
        ({}, "asleep", "skyctl wake"),
        ({}, "dead", "skyctl logs tiny-0; then: skyctl restart tiny-0"),
        ({}, "starting", ""),
    ],
)
def test_a_server_that_is_not_as_it_was_asked_to_be_drifted(
    row: dict[str, Any], state: str, hint: str
) -> None:
    [drift] = from_intent([replica(state=state)], [ServerRow("tiny-0", **row)])
    assert (drift.server, drift.hint) == ("tiny-0", hint)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({}, "ready"),
        ({"paused": True}, "paused"),
        ({"sleep_level": 1}, "asleep"),
        ({"sleep_level": 1, "paused": True}, "asleep"),
        ({}, "updating"),
    ],
)
def test_a_server_that_is_as_it_was_asked_to_be_did_not(row: dict[str, Any], state: str) -> None:
    assert from_intent([replica(state=state)], [ServerRow("tiny-0", **row)]) == []


def test_a_server_nobody_asked_anything_of_is_meant_to_run() -> None:
    assert from_intent([replica()], []) == []
    assert len(from_intent([replica(state="paused")], [])) == 1


def test_a_server_with_other_weights_than_the_fleet_drifted() -> None:
    behind, starting = replica("b"), replica("c", state="starting")
    found = from_weights(status(replica("a", weight_version="v2"), behind, starting, version="v2"))
    assert [drift.server for drift in found] == ["b"]
    assert "has weights base, the fleet v2" in found[0].detail
    assert from_weights(status(replica("a"))) == []


def test_a_ready_server_is_routed_and_a_dead_one_is_not() -> None:
    found = from_routing(
        status(
            replica("a", routed=False),
            replica("b", state="quarantined", routed=True),
            replica("c", routed=True),
            replica("d", state="paused", routed=False),
            replica("e", routed=None),
        )
    )
    assert [drift.server for drift in found] == ["a", "b"]
