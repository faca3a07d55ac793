"""What is the matter with a server: asked of stubs, judged by a pure function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyctl.core.diagnosis import judge
from skyctl.core.observation import Observed, observe
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.states import ReplicaState
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import InDoubt
from skyctl.store.state import ServerRow
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.inprocess import StubTransport

V1 = FleetWeights("v1", "/ckpt/v1", "digest")
BASE = FleetWeights()
HALF = InDoubt("a", "push-3", "update", True, True)
FROZEN = InDoubt("a", "push-3", "pause", False, True)


def found(
    seen: Observed,
    row: ServerRow | None = None,
    doubt: InDoubt | None = None,
    weights: FleetWeights = BASE,
    ours: bool = True,
) -> tuple[str, str]:
    finding = judge(seen, row or ServerRow("a"), doubt, weights, ours=ours)
    return finding.condition, finding.action


@pytest.mark.parametrize(
    ("what", "ours", "expected"),
    [
        ({}, True, ("healthy", "nothing")),
        ({"doubt": HALF}, True, ("half-updated", "push")),
        ({"doubt": FROZEN}, True, ("frozen", "resume")),
        ({"doubt": FROZEN}, False, ("frozen", "resume")),
        ({"doubt": replace(FROZEN, woken=True)}, False, ("woken", "sleep")),
        ({"doubt": FROZEN, "weights": V1}, False, ("wrong-version", "push")),
        ({"doubt": FROZEN, "weights": V1}, True, ("wrong-version", "push")),
        (
            {"doubt": FROZEN, "row": ServerRow("a", weight_version="v0"), "weights": V1},
            False,
            ("wrong-version", "push"),
        ),
        (
            {"doubt": replace(FROZEN, version="v1"), "weights": V1},
            True,
            ("frozen", "resume"),
        ),
        ({"row": ServerRow("a", quarantine="broken")}, True, ("quarantined", "restart")),
        ({"row": ServerRow("a", quarantine="broken")}, False, ("quarantined", "push")),
        (
            {"row": ServerRow("a", weight_version="v0"), "weights": V1},
            True,
            ("wrong-version", "push"),
        ),
        ({"row": ServerRow("a"), "weights": V1}, True, ("wrong-version", "push")),
        ({"row": ServerRow("a", weight_version="v0")}, True, ("wrong-version", "restart")),
        ({"row": ServerRow("a", weight_version="v1"), "weights": V1}, True, ("healthy", "nothing")),
        (
            {"row": ServerRow("a", weight_version="v1", checkpoint_digest="x"), "weights": V1},
            True,
            ("wrong-version", "push"),
        ),
    ],
)
def test_a_server_that_answers(what: dict[str, Any], ours: bool, expected: object) -> None:
    assert found(Observed("a", version=None), ours=ours, **what) == expected


def test_from_outside_the_label_that_a_server_carries_counts() -> None:
    seen = Observed("a", version="default")  # started by somebody else
    for version in ("v1", None):  # anew; or no push of ours has reached it yet
        row = ServerRow("a", weight_version=version)
        assert found(seen, row, weights=V1, ours=False) == ("wrong-version", "push")
        for doubt in (FROZEN, replace(FROZEN, woken=True)):  # whatever a push had left in it
            assert found(seen, row, doubt, V1, ours=False) == ("wrong-version", "push")
    assert found(seen, weights=BASE, ours=False) == ("healthy", "nothing")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Observed("a", engine=False), "stuck"),
        (Observed("a", engine=False, http=False), "unreachable"),
    ],
)
def test_one_that_does_not_answer_is_restarted_or_else_quarantined(
    seen: Observed, expected: str
) -> None:
    assert found(seen, doubt=HALF) == (expected, "restart")
    assert found(seen, ours=False) == (expected, "quarantine")


def test_what_the_supervisor_is_busy_with_is_left_to_it() -> None:
    assert found(Observed("a", state=ReplicaState.UPDATING, engine=False)) == ("busy", "nothing")
    assert found(Observed("a", state=ReplicaState.FAILED)) == ("failed", "restart")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Observed("a", version="v1"), ("half-updated", "push")),
        (Observed("a", version="v1", sleep_level=2), ("healthy", "nothing")),
        (Observed("a", version="v1", paused=True), ("healthy", "nothing")),
        (Observed("a", version=None), ("healthy", "nothing")),  # its engine has no labels
    ],
)
def test_one_that_another_program_woke_after_its_weights_were_discarded_serves_none(
    seen: Observed, expected: tuple[str, str]
) -> None:
    row = ServerRow("a", weight_version="v1", checkpoint_digest="digest", sleep_level=2)
    assert found(seen, row, weights=V1, ours=False) == expected
    assert found(seen, row, weights=V1) == ("healthy", "nothing")  # perhaps its trainer loaded it
    assert found(seen, replace(row, sleep_level=1), weights=V1, ours=False)[0] == "healthy"
    fresh = Observed("a", version="default")  # before a first push: it may have been restarted
    assert found(fresh, ServerRow("a", sleep_level=2), ours=False)[0] == "healthy"


def test_a_pause_of_somebody_elses_is_no_fault() -> None:
    finding = judge(Observed("a", paused=True), ServerRow("a"), None, BASE, ours=True)
    assert (finding.condition, finding.action) == ("healthy", "nothing")
    assert "skyctl resume" in finding.explained


@pytest.mark.parametrize(
    ("recorded", "reported", "ours", "expected"),
    [
        ("v1", "v1", True, ("healthy", "nothing")),
        ("v1", "b1", True, ("wrong-version", "push")),
        ("v1", "b1", False, ("wrong-version", "push")),
        ("v1", "default", True, ("wrong-version", "push")),
        (None, "b1", True, ("healthy", "nothing")),  # a trainer that pushes by itself
        (None, "b1", False, ("healthy", "nothing")),
    ],
)
def test_what_a_server_says_it_holds_is_compared_with_the_record(
    recorded: str | None, reported: str, ours: bool, expected: tuple[str, str]
) -> None:
    row = ServerRow("a", weight_version=recorded)
    weights = V1 if recorded else BASE
    assert found(Observed("a", version=reported), row, weights=weights, ours=ours) == expected
    said = judge(Observed("a", version=reported), row, None, weights, ours=ours).detail
    assert ("b1" in said) is (reported == "b1" and (ours or recorded is not None))


@pytest.mark.parametrize(("level", "advice"), [(0, "resume"), (1, "wake"), (2, "wake")])
async def test_a_sleep_that_is_not_on_record_is_told_from_a_pause(level: int, advice: str) -> None:
    stub = StubServer()
    await (stub.engine.sleep(level, "abort") if level else stub.engine.pause("keep"))
    transport = StubTransport([stub])
    async with ControlClient(transport=transport) as client:
        [seen] = await observe(client, transport.targets)
    finding = judge(seen, ServerRow("stub-0"), None, BASE, ours=True)
    assert (finding.action, finding.explained[-len(advice) :]) == ("nothing", advice)


@pytest.mark.parametrize(
    ("row", "weights", "expected"),
    [
        (ServerRow("stub-0", weight_version="v1"), V1, "stuck"),
        (ServerRow("stub-0"), V1, "stuck"),
        (ServerRow("stub-0"), BASE, "healthy"),
    ],
)
async def test_a_version_that_cannot_be_read_is_not_taken_for_no_version(
    row: ServerRow, weights: FleetWeights, expected: str
) -> None:
    transport = StubTransport([StubServer(faults={"/weight_info": Fault("status", status=500)})])
    async with ControlClient(transport=transport) as client:
        [seen] = await observe(client, transport.targets)
    finding = judge(seen, row, None, weights, ours=False)
    assert (finding.condition, finding.action) == (
        expected,
        "quarantine" if expected == "stuck" else "nothing",
    )
    assert judge(seen, row, FROZEN, weights, ours=True).action == "restart"


async def test_a_version_has_as_long_to_come_as_what_the_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyctl.core.observation.HTTP_TIMEOUT_S", 0.05)
    late = StubServer(faults={"/weight_info": Fault("delay", seconds=0.2)})
    transport = StubTransport([late])
    async with ControlClient(transport=transport) as client:
        [seen] = await observe(client, transport.targets, engine_timeout_s=30.0)
    assert (seen.version, seen.version_problem) == ("default", "")


async def test_servers_are_asked_front_end_and_engine_apart() -> None:
    stuck = StubServer(faults={"/is_paused": Fault("hang")})
    dead_engine = StubServer()
    dead_engine.engine.dead = True
    paused = StubServer()
    await paused.engine.pause("keep")
    transport = StubTransport([paused, stuck, dead_engine])
    targets = [*transport.targets, ServerTarget("gone", "http://gone")]
    async with ControlClient(transport=transport) as client:
        seen = await observe(client, targets, engine_timeout_s=0.2)
    assert [(one.http, one.engine, one.paused) for one in seen] == [
        (True, True, True),
        (True, False, False),
        (True, False, False),
        (False, False, False),
    ]
    assert seen[0].version == "default"
